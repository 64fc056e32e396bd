# SPDX-License-Identifier: Apache-2.0
"""Files of tokenizers: ours, and those of other libraries."""

import base64
from collections.abc import Callable
import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from spdf_jax import files
from spdf_jax.data import special_tokens
from spdf_jax.data import tokenizers
from spdf_jax.data.special_tokens import read_special_tokens
from spdf_jax.data.special_tokens import SpecialTokens
from spdf_jax.data.special_tokens import template_begin
from spdf_jax.data.tokenizers import Tokenizer
from spdf_jax.names import lookup

_SETTINGS = (
    'tokenizer_config.json', 'special_tokens_map.json', 'added_tokens.json',
    'chat_template.jinja',
)
_VOCABULARIES = (('vocab.json', 'merges.txt'), ('encoder.json', 'vocab.bpe'))


def save_tokenizer(path: Path | str, tokenizer: Tokenizer) -> None:
  """Writes a tokenizer to a JSON file, atomically.

  Args:
    path: The file to write.
    tokenizer: The tokenizer.

  Example:
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / 'tokenizer.json'
    >>> save_tokenizer(path, tokenizers.ByteTokenizer())
    >>> load_tokenizer(path)
    ByteTokenizer()
  """
  files.write_atomically(path, tokenizer.to_json())


def load_tokenizer(path: Path | str) -> Tokenizer:
  """Reads a tokenizer written by `save_tokenizer`.

  Args:
    path: The file to read.

  Returns:
    A tokenizer with the kind and fingerprint of the saved one.

  Raises:
    FileNotFoundError: there is no such file.
    ImportError: the tokenizer needs an extra that is not installed.
    ValueError: the file is not a tokenizer, or is of an unknown kind.

  Example:
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / 'tokenizer.json'
    >>> tokenizer = tokenizers.train_bpe(['to be or not to be'] * 2, 258)
    >>> save_tokenizer(path, tokenizer)
    >>> load_tokenizer(path).vocab_size
    258
  """
  kinds: dict[str, Callable[[Any], Tokenizer]] = {
      'bytes': lambda fields: tokenizers.ByteTokenizer(),
      'bpe': lambda fields: tokenizers.bpe_from_parts(
          fields['vocab'], fields['merges']
      ),
      'tokenizers': lambda fields: tokenizers.library_tokenizer(
          json.dumps(fields['model']), _special_of(fields)
      ),
      'sentencepiece': lambda fields: tokenizers.sentencepiece_tokenizer(
          base64.b64decode(fields['model'])
      ),
  }
  with files.reading(path, 'write one with save_tokenizer.'):
    fields = json.loads(Path(path).read_bytes())
    build = lookup('tokenizer kind', fields['kind'], kinds)
    tokenizer = _with_special(build(fields), _special_of(fields))
    if fields.get('special_tokens'):
      return tokenizers.with_special_tokens(tokenizer)
    return tokenizer


def open_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
  """Reads a tokenizer from a file or folder.

  Args:
    path: A `tokenizer.json` of the library `tokenizers` or of `save_tokenizer`,
      a sentencepiece `.model`, or a folder with one of them or with GPT-2's
      `vocab.json` and `merges.txt` (also `encoder.json` and `vocab.bpe`). Of a
      folder, the special tokens of the configs beside the tokenizer are used,
      as far as they are in its vocabulary.

  Returns:
    The tokenizer. A GPT-2 tokenizer has one fingerprint in all these formats.

  Raises:
    ImportError: the library of the tokenizer is not installed.
    ValueError: there is no tokenizer, or a file is damaged.

  Example:
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / 'tokenizer.json'
    >>> tokenizer = tokenizers.train_bpe(['to be or not'] * 2, vocab_size=258)
    >>> _ = path.write_text(tokenizer.model.to_str())
    >>> open_tokenizer(path.parent).fingerprint == tokenizer.fingerprint
    True
  """
  path = Path(path).expanduser()
  folder = path if path.is_dir() else None
  if folder:
    path = _file_in(path)
  with files.reading(
      path, 'give a tokenizer.json, a .model of sentencepiece, or a folder '
      'with vocab.json and merges.txt.',
  ):
    if path.name in {vocabulary for vocabulary, _ in _VOCABULARIES}:
      return _stated(_read_vocabulary(path), folder)
    if path.suffix == '.model':
      return _stated(
          tokenizers.sentencepiece_tokenizer(path.read_bytes()), folder
      )
    text = path.read_bytes().decode('utf-8-sig')
    fields = json.loads(text)
    if 'kind' in fields:
      return load_tokenizer(path)
    if _is_gpt2_like(fields):
      model = fields['model']
      merges = [
          merge.split(' ') if isinstance(merge, str) else merge
          for merge in model['merges']
      ]
      vocabulary = _full_vocabulary(fields)
      return _stated(tokenizers.bpe_from_parts(vocabulary, merges), folder)
    return _with_named(
        tokenizers.library_tokenizer(text, _stated_by(text, folder)), folder
    )


def _special_of(fields: dict[str, Any]) -> SpecialTokens:
  if 'special' not in fields:
    return SpecialTokens()
  begin, adds_begin, ends = fields['special']
  return SpecialTokens(begin, adds_begin, tuple(ends))


def _with_special(tokenizer: Tokenizer, special: SpecialTokens) -> Tokenizer:
  if special == SpecialTokens():
    return tokenizer
  changes: dict[str, Any] = {'special': special}
  if isinstance(tokenizer, tokenizers.LibraryTokenizer) and special.ends:
    changes['end_of_text'] = special.ends[0]
  return dataclasses.replace(tokenizer, **changes)  # type: ignore[type-var]


def _stated(tokenizer: Any, folder: Path | None) -> Tokenizer:
  """Returns a tokenizer with the special tokens that a model's files state."""
  if folder is None:
    return tokenizer
  if isinstance(tokenizer, tokenizers.LibraryTokenizer):
    id_of, default = tokenizer.model.token_to_id, SpecialTokens()
  else:
    known = {
        tokenizer.model.id_to_piece(i): i for i in range(tokenizer.vocab_size)
    }
    id_of, begin = known.get, tokenizer.model.bos_id()
    default = SpecialTokens(begin if begin >= 0 else None)
  special = read_special_tokens(folder, id_of, tokenizer.vocab_size, default)
  special = special._replace(ends=special.ends or (tokenizer.end_of_text,))
  plain = SpecialTokens(None, False, (tokenizer.end_of_text,))
  # A beginning that is also the end needs no record, as in GPT-2.
  if special.begin in special.ends and not special.adds_begin:
    special = special._replace(begin=None)
  if special != plain:
    tokenizer = _with_special(tokenizer, special)
  return _with_named(tokenizer, folder)


def _with_named(tokenizer: Tokenizer, folder: Path | None) -> Tokenizer:
  """Adds the special tokens that only the files beside a tokenizer name."""
  if folder is None or not isinstance(tokenizer, tokenizers.LibraryTokenizer):
    return tokenizer
  model = tokenizer.model
  known = {token.content for token in model.get_added_tokens_decoder().values()}
  missing = [
      text for text in special_tokens.named_tokens(folder)
      if text not in known and model.token_to_id(text) is not None
  ]
  if not missing:
    return tokenizer
  model.add_special_tokens(missing)
  # Vocabulary and merges alone no longer determine it.
  return dataclasses.replace(tokenizer, kind='tokenizers')


def _stated_by(text: str, folder: Path | None) -> SpecialTokens:
  """Returns the special tokens of a tokenizer.json and the files beside it."""
  fields = json.loads(text)
  if folder is None:  # Only the file itself was given, without its folder.
    begin = template_begin(fields.get('post_processor'))
    return SpecialTokens(begin, begin is not None)
  vocabulary = fields.get('model', {}).get('vocab', {})
  if not isinstance(vocabulary, dict):  # Unigram: pairs of a token and score.
    vocabulary = {pair[0]: i for i, pair in enumerate(vocabulary)}
  added = fields.get('added_tokens') or ()
  vocabulary = vocabulary | {entry['content']: entry['id'] for entry in added}
  size = max(vocabulary.values(), default=-1) + 1
  return read_special_tokens(folder, vocabulary.get, size, SpecialTokens())


def export_tokenizer(
    path: str | os.PathLike[str], tokenizer: Tokenizer
) -> list[Path]:
  """Writes a tokenizer in the format of transformers, if it has one.

  A `LibraryTokenizer`, such as that of `train_bpe`, can then be read by
  transformers. Others, of bytes or of sentencepiece, are written as by
  `save_tokenizer`, which only `open_tokenizer` and `load_tokenizer` read.

  Args:
    path: The file to write, a `tokenizer.json`.
    tokenizer: The tokenizer.

  Returns:
    The written files: `path` and, beside a `LibraryTokenizer`, a
    `tokenizer_config.json`, which names the tokens that begin and end a text.

  Example:
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / 'tokenizer.json'
    >>> tokenizer = tokenizers.train_bpe(['to be or not'] * 2, vocab_size=258)
    >>> [written.name for written in export_tokenizer(path, tokenizer)]
    ['tokenizer.json', 'tokenizer_config.json']
    >>> open_tokenizer(path).fingerprint == tokenizer.fingerprint
    True
  """
  path = Path(path)
  if not isinstance(tokenizer, tokenizers.LibraryTokenizer):
    save_tokenizer(path, tokenizer)
    return [path]
  files.write_atomically(path, _with_template(tokenizer))
  settings = path.with_name('tokenizer_config.json')
  token = tokenizer.model.id_to_token
  files.write_atomically(settings, json.dumps({
      'tokenizer_class': 'PreTrainedTokenizerFast',
      'bos_token': token(special_tokens.begin_of(tokenizer)),
      'eos_token': token(tokenizer.end_of_text),
      'clean_up_tokenization_spaces': False,
  }, indent=2) + '\n')
  return [path, settings]


def _with_template(tokenizer: tokenizers.LibraryTokenizer) -> str:
  """Returns the JSON of a tokenizer whose template begins texts as it does.

  Files beside the tokenizer may have decided otherwise than its template, and
  are not exported.
  """
  text = tokenizer.model.to_str()
  fields = json.loads(text)
  post = fields.get('post_processor')
  special = special_tokens.special_of(tokenizer)
  if special.adds_begin == (template_begin(post) is not None):
    return text
  others = [
      each for each in special_tokens.processors(post)
      if template_begin(each) is None
  ]
  if special.adds_begin:
    token = tokenizer.model.id_to_token(special.begin)
    begin = {'SpecialToken': {'id': token, 'type_id': 0}}
    part = lambda name: {'Sequence': {'id': name, 'type_id': 0}}
    others.append({
        'type': 'TemplateProcessing', 'single': [begin, part('A')],
        'pair': [begin, part('A'), part('B')], 'special_tokens': {
            token: {'id': token, 'ids': [special.begin], 'tokens': [token]}
        },
    })
  fields['post_processor'] = (
      {'type': 'Sequence', 'processors': others} if others else None
  )
  return json.dumps(fields, ensure_ascii=False)


def tokenizer_paths(folder: str | os.PathLike[str]) -> list[Path]:
  """Returns the paths of the files of a folder that belong to a tokenizer.

  Args:
    folder: Folder of a tokenizer or of a model.

  Returns:
    Paths of the existing files of vocabulary, merges, models and settings such
    as `tokenizer_config.json`, in a fixed order; empty if there are none.

  Example:
    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> (folder / 'tokenizer.json').write_text('{}')
    2
    >>> [path.name for path in tokenizer_paths(folder)]
    ['tokenizer.json']
  """
  folder = Path(folder)
  names = (
      'tokenizer.json', *(x for pair in _VOCABULARIES for x in pair), *_SETTINGS
  )
  paths = [folder / name for name in names]
  return [x for x in paths if x.is_file()] + sorted(folder.glob('*.model'))


def _file_in(folder: Path) -> Path:
  for name in ('tokenizer.json', *(v for v, _ in _VOCABULARIES)):
    if (folder / name).is_file():
      return folder / name
  models = sorted(folder.glob('*.model'))
  if models:
    return models[0]
  raise ValueError(
      f'tokenizer={str(folder)!r} holds no tokenizer.json, no vocab.json with'
      ' merges.txt and no .model; give the folder of a tokenizer.'
  )


def _read_vocabulary(path: Path) -> Tokenizer:
  vocab = json.loads(path.read_bytes())
  text = (path.parent / dict(_VOCABULARIES)[path.name]).read_bytes()
  lines = text.decode('utf-8-sig').split('\n')
  merges = [
      line.split(' ') for line in lines
      if line.strip() and not line.startswith('#version')
  ]
  return tokenizers.bpe_from_parts(vocab, merges)


def _is_gpt2_like(fields: dict[str, Any]) -> bool:
  """Returns whether `bpe_from_parts` can build the tokenizer of a file."""
  pre = fields.get('pre_tokenizer') or {}
  model = fields['model']
  others = [t for t in fields.get('added_tokens', ())
            if t['content'] != tokenizers.END_OF_TEXT]
  return (
      model.get('type', 'BPE') == 'BPE'
      and not others
      and tokenizers.END_OF_TEXT in _full_vocabulary(fields)
      and fields.get('normalizer') is None
      and pre.get('type') == 'ByteLevel'
      and not pre.get('add_prefix_space')
      and pre.get('use_regex', True)
      and not model.get('byte_fallback')
      and not model.get('ignore_merges')
      and model.get('unk_token') in (None, tokenizers.END_OF_TEXT)
  )


def _full_vocabulary(fields: dict[str, Any]) -> dict[str, int]:
  added = {t['content']: t['id'] for t in fields.get('added_tokens', ())}
  return {**fields['model']['vocab'], **added}
