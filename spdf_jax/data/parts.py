# SPDX-License-Identifier: Apache-2.0
"""Corpora made by several machines: each prepares a part, one joins them."""

from collections import Counter
import os
from pathlib import Path
from typing import Any
import zlib

from spdf_jax.data.corpora import Corpus
from spdf_jax.data.corpora import open_corpus
from spdf_jax.data.corpora import SPLITS
from spdf_jax.data.encoding import Encoded
from spdf_jax.data.preparation import check_faults
from spdf_jax.data.preparation import prepare
from spdf_jax.data.shares import parse_part
from spdf_jax.data.shares import Part
from spdf_jax.data.shares import parts_in
from spdf_jax.data.tokenizers import load_tokenizer
from spdf_jax.data.unfinished import differences
from spdf_jax.data.unfinished import read_state
from spdf_jax.data.unfinished import remove_leftover
from spdf_jax.data.unfinished import Unfinished

_CHUNK = 1 << 22  # Bytes copied at a time.


def prepare_part(
    input: str | os.PathLike[str], part: str, **arguments: Any
) -> str:
  """Tokenizes one of n parts of an input, for `join_parts`.

  The concatenated files are cut into n equal ranges: files of JSON lines at
  line breaks, others are not divided. Every part has a folder of its own in
  `output/partial`, so that machines that share the folder prepare parts at the
  same time; from machines that do not, copy those folders together. A tokenizer
  that is learned is learned by every part, from the same documents. After a
  kill, the same call continues.

  Args:
    input: A file or folder, the same for all parts.
    part: Part to prepare, `'i/n'` with i from 1 to n.
    **arguments: Arguments of `prepare_files`, the same for all parts.

  Returns:
    A sentence with the number of documents of the part, and what is next.

  Raises:
    ImportError: A library of the extra `prepare` is missing.
    ValueError: An argument or the input is not valid, another process prepares
      this part, or `output` holds another corpus or another division.

  Example:
    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / 'a.jsonl').write_text(
    ...     ''.join(f'{{"text": "Text {i}."}}\\n' for i in range(100)))
    >>> settings = dict(tokenizer='bytes', output=folder / 'out',
    ...     validation=0.1, test=0.1)
    >>> for part in ('1/2', '2/2'):
    ...   _ = prepare_part(folder, part, **settings)
    >>> join_parts(folder / 'out').train.tokens.size > 0
    True
  """
  parsed = parse_part(part)
  output = Path(arguments['output']).expanduser()
  done = prepare(input, parsed, **arguments)
  if isinstance(done, Corpus):
    return f'{output} is prepared already, with fingerprint {done.fingerprint}'
  work, _ = done
  work.finish_part()
  documents = work.state['position']['documents']
  left = [
      str(Part(number, parsed.total)) for number in range(1, parsed.total + 1)
      if not _is_finished(output / 'partial', Part(number, parsed.total))
  ]
  following = f'{", ".join(left)} to go' if left else 'join the parts'
  return f'part {part} has {documents:,} documents; {following}'


def join_parts(output: str | os.PathLike[str]) -> Corpus:
  """Joins the parts of a corpus, and removes them.

  The corpus is token for token, and by its fingerprint, the one that
  `prepare_files` writes from the whole input. Until the end, the parts and the
  corpus exist side by side. After a kill, the same call continues.

  Args:
    output: Folder of the corpus, with all parts in its folder `partial`.

  Returns:
    The corpus.

  Raises:
    ValueError: A part is missing, not finished, damaged, there twice or of
      another input, a split is empty, or too many documents are faulty.
  """
  output = Path(output).expanduser()
  found = parts_in(output)
  if not found:
    if (output / 'partial').exists() or not (output / 'train.json').exists():
      raise ValueError(
          f'output={str(output)!r} holds no parts of a corpus; prepare them'
          ' with part=1/n to n/n.'
      )
    remove_leftover(output)
    return open_corpus(output)  # Joined before.
  states = _read_states(output, found)
  made_from = dict(next(iter(states.values()))['made_from'])
  del made_from['part']
  work = Unfinished(output, made_from)
  tokenizer = work.tokenizer(
      lambda: load_tokenizer(next(iter(found.values())) / 'tokenizer.json')
  )
  for part, state in states.items():
    if state['tokenizer'] != tokenizer.fingerprint:
      raise ValueError(
          f'part {part} in {found[part]} has another tokenizer than the others;'
          ' delete this folder and prepare the part again with the libraries'
          ' that the others used.'
      )
  if not work.state.get('joined'):
    for part, state in states.items():
      _append(work, found[part], state)
    position = work.state['position']
    check_faults(
        position['skipped'], position['documents'],
        max(state['max_faults'] for state in states.values()), None, done=True,
    )
    work.state['joined'] = True
    work.save()
  return work.finish(tokenizer)


def _is_finished(folder: Path, part: Part) -> bool:
  path = folder / part.folder / 'state.json'
  return path.exists() and bool(
      read_state(path, f'delete {path.parent}.').get('finished')
  )


def _read_states(
    output: Path, found: dict[Part, Path]
) -> dict[Part, dict[str, Any]]:
  """Reads the states of all parts; raises ValueError unless they fit."""
  total = next(iter(found)).total
  states: dict[Part, dict[str, Any]] = {}
  for part, folder in found.items():
    if part.total != total:
      raise ValueError(
          f'output={str(output)!r} holds parts of {total} and of {part.total};'
          ' delete those of one division.'
      )
    path = folder / 'state.json'
    mend = f'delete {folder} and prepare part {part} again.'
    states[part] = read_state(path, mend) if path.exists() else {}
    if not states[part].get('finished'):
      raise ValueError(
          f'part {part} in {folder} is not finished; run the command that'
          f' prepares part {part} again, then join.'
      )
    made_from = states[part]['made_from']
    if made_from['part'] != str(part):
      raise ValueError(
          f'{folder} holds part {made_from["part"]}, not part {part}, so that'
          f' part {made_from["part"]} would be there twice; {mend}'
      )
    first = next(iter(states.values()))['made_from']
    different = differences(
        made_from | {'part': ''}, first | {'part': ''}
    )
    if different:
      raise ValueError(
          f'part {part} in {folder} was made of other {different} than part'
          f' {next(iter(states))}; delete one of them and prepare it again with'
          ' the same arguments.'
      )
  missing = [
      str(Part(number, total)) for number in range(1, total + 1)
      if Part(number, total) not in found
  ]
  if missing:
    raise ValueError(
        f'output={str(output)!r} has no part {", ".join(missing)}; prepare what'
        ' is missing, or copy its folder to partial, then join.'
    )
  return states


def _append(work: Unfinished, folder: Path, state: dict[str, Any]) -> None:
  """Appends the tokens of a part; raises ValueError if they were changed."""
  position = work.state['position']
  done = state['position']
  position = dict(
      file=position['file'] + done['file'], items=0,
      skipped=dict(Counter(position['skipped']) + Counter(done['skipped'])),
      documents=position['documents'] + done['documents'], split=None,
  )
  for split in SPLITS:
    counts = state['splits'][split]
    size = crc32 = 0
    path = folder / f'{split}.ids'
    if path.exists():
      with path.open('rb') as file:
        while chunk := file.read(_CHUNK):
          size, crc32 = size + len(chunk), zlib.crc32(chunk, crc32)
          work.append({split: Encoded(chunk, 0, 0)}, position)
    if (size, crc32) != (counts['size'], counts['crc32']):
      raise ValueError(
          f'{path} holds other bytes than were written; delete'
          f' {folder} and prepare this part again.'
      )
    work.append(
        {split: Encoded(b'', counts['documents'], counts['bytes'])}, position
    )
