# SPDX-License-Identifier: Apache-2.0
"""Special tokens of a model, as its own files state them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import logging
from pathlib import Path
from typing import Any, NamedTuple

from spdf_jax import files

logger = logging.getLogger('spdf_jax')


class SpecialTokens(NamedTuple):
  """The tokens that begin and end the texts of a model."""

  begin: int | None = None
  """Id of the beginning of a text; `None`: the end of text before it."""

  adds_begin: bool = False
  """Whether every text begins with it."""

  ends: tuple[int, ...] = ()
  """Ids that end a text; empty: the tokenizer's `end_of_text` alone."""


def special_of(tokenizer: Any) -> SpecialTokens:
  """Returns the beginning and all end-of-text tokens of a tokenizer.

  Example:
    >>> from spdf_jax.data import ByteTokenizer
    >>> special_of(ByteTokenizer())
    SpecialTokens(begin=None, adds_begin=False, ends=(256,))
  """
  special = getattr(tokenizer, 'special', SpecialTokens())
  return special._replace(ends=special.ends or (tokenizer.end_of_text,))


def begin_of(tokenizer: Any) -> int:
  """Returns the token before a text: its beginning, else the end of text."""
  begin = special_of(tokenizer).begin
  return tokenizer.end_of_text if begin is None else begin


def begun(tokenizer: Any, ids: Sequence[int]) -> list[int]:
  """Returns a text's ids after the beginning of text, if the model has it.

  Ids that begin with it already, because the text spells it, are left alone.

  Example:
    >>> from spdf_jax.data import ByteTokenizer
    >>> begun(ByteTokenizer(), [97])
    [97]
  """
  begin, ids = begin_of(tokenizer), list(ids)
  if not special_of(tokenizer).adds_begin or ids[:1] == [begin]:
    return ids
  return [begin, *ids]


def read_special_tokens(
    folder: Path,
    id_of: Callable[[str], int | None],
    vocab_size: int,
    default: SpecialTokens,
) -> SpecialTokens:
  """Reads special tokens from the files beside a tokenizer.

  Tokens of the tokenizer's files come first, then those of the model's config
  and of its generation config; ids outside the vocabulary are left out, such as
  the default ids of transformers in a model with a small vocabulary.

  Args:
    folder: Folder with `tokenizer.json`, `tokenizer_config.json`,
      `special_tokens_map.json`, `config.json` and `generation_config.json`, of
      which any may be missing.
    id_of: Function from a token to its id; `None`: it is not in the vocabulary.
    vocab_size: Number of ids.
    default: Special tokens of the tokenizer's own file, used for those that
      the files of the model leave out.

  Returns:
    The special tokens; fields that no file states are those of `default`.

  Raises:
    ValueError: a file is not a JSON object.

  Example:
    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / 'config.json').write_text(
    ...     '{"bos_token_id": 1, "eos_token_id": [2, 3]}')
    >>> read_special_tokens(folder, {}.get, 8, SpecialTokens())
    SpecialTokens(begin=1, adds_begin=False, ends=(2, 3))
  """
  def read(name):
    path = folder / name
    return files.read_object(path, 'fetch it again.') if path.exists() else {}

  settings = read('tokenizer_config.json')
  named = read('special_tokens_map.json')
  config, generation = read('config.json'), read('generation_config.json')

  def tokens(name):
    for fields in (settings, named):
      text = _text_of(fields.get(f'{name}_token'))
      token = None if text is None else id_of(text)
      if token is not None:
        return [token]
    return []

  def ids(name):
    values = [
        i for fields in (config, generation)
        for i in _ids_of(fields.get(f'{name}_token_id'))
    ]
    outside = sorted({i for i in values if not 0 <= i < vocab_size})
    if outside:
      logger.warning(
          'the files in %s name %s as %s_token_id, outside the vocabulary of '
          '%d tokens; they are left out', folder, outside, name, vocab_size,
      )
    return [i for i in values if i not in outside]

  template = template_begin(read('tokenizer.json').get('post_processor'))
  begins = [*([] if template is None else [template]), *tokens('bos')]
  begins = list(dict.fromkeys([*begins, *ids('bos')]))
  begin = begins[0] if begins else default.begin
  if len(begins) > 1:
    logger.warning(
        'the files in %s name the tokens %s as the beginning of a text; %d is '
        'used', folder, begins, begin,
    )
  last, stated = tokens('eos'), ids('eos')
  ends = tuple(dict.fromkeys([*last, *stated])) or default.ends
  if last and stated and last[0] not in stated:
    logger.warning(
        'the tokenizer in %s ends a text with %d, and the configs of the model '
        'end it with %s; generation stops at each, and %d ends documents',
        folder, last[0], stated, last[0],
    )
  elif len(ends) > 1:
    logger.info('texts of %s end with any of the tokens %s', folder, ends)
  adds = template is not None or default.adds_begin
  if 'add_bos_token' in settings:
    stated = bool(settings['add_bos_token'])
    conflict = stated != adds and begin is not None
    if _is_llama(settings, config):
      adds = stated
    if conflict:
      logger.warning(
          'add_bos_token is %s in %s, which contradicts the tokenizer itself; '
          'texts %s with token %d', stated, folder,
          'begin' if adds else 'do not begin', begin,
      )
  if 'chat_template' in settings or (folder / 'chat_template.jinja').exists():
    logger.warning(
        'the tokenizer in %s has a chat template, which is not applied: texts '
        'are encoded as they are', folder,
    )
  return SpecialTokens(begin, adds and begin is not None, ends)


def named_tokens(folder: Path) -> list[str]:
  """Returns the tokens that the files beside a tokenizer name as special.

  Args:
    folder: Folder with `tokenizer_config.json` and `special_tokens_map.json`,
      of which any may be missing.

  Returns:
    The texts of the tokens, which transformers adds to a tokenizer that does
    not list them itself.

  Raises:
    ValueError: a file is not a JSON object.

  Example:
    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / 'tokenizer_config.json').write_text(
    ...     '{"unk_token": "<unk>", "add_bos_token": true}')
    >>> named_tokens(folder)
    ['<unk>']
  """
  entries: list[Any] = []
  for name in ('tokenizer_config.json', 'special_tokens_map.json'):
    if not (folder / name).exists():
      continue
    for key, value in files.read_object(
        folder / name, 'fetch it again.'
    ).items():
      if key == 'added_tokens_decoder' and isinstance(value, Mapping):
        entries += [
            each for each in value.values()
            if isinstance(each, Mapping) and each.get('special')
        ]
      elif key.endswith('_special_tokens'):  # A list, or a mapping by name.
        entries += value.values() if isinstance(value, Mapping) else value or ()
      elif key.endswith('_token'):
        entries.append(value)
  texts = map(_text_of, entries)
  return list(dict.fromkeys(text for text in texts if text))


def _text_of(token: Any) -> str | None:
  """Returns the text of a token, which may be an object with its content."""
  if isinstance(token, Mapping):
    token = token.get('content')
  return token if isinstance(token, str) else None


def _ids_of(value: Any) -> list[int]:
  values = value if isinstance(value, list) else [value]
  return [x for x in values if isinstance(x, int) and not isinstance(x, bool)]


def _is_llama(settings: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
  """Returns whether transformers applies `add_bos_token` to the tokenizer."""
  kind = str(settings.get('tokenizer_class', config.get('model_type', '')))
  return any(x in kind.lower() for x in ('llama', 'gemma', 'mistral'))


def template_begin(post: Any) -> int | None:
  """Returns the token that a post-processor of `tokenizers` begins with."""
  for each in processors(post):
    if each.get('type') == 'TemplateProcessing':
      first = (each.get('single') or [{}])[0].get('SpecialToken')
      known = each.get('special_tokens', {})
      if first and first.get('id') in known:
        return known[first['id']]['ids'][0]
    elif each.get('type') in ('BertProcessing', 'RobertaProcessing'):
      return each['cls'][1]
  return None


def processors(post: Any) -> Iterator[Mapping[str, Any]]:
  """Yields the parts of a post-processor of `tokenizers`."""
  if isinstance(post, Mapping):
    if post.get('type') == 'Sequence':
      for each in post.get('processors', ()):
        yield from processors(each)
    else:
      yield post
