"""Shards of a corpus: machines prepare one each, and one machine joins them."""

from collections import Counter
from collections.abc import Sequence
import os
from pathlib import Path
import re
from typing import Any, NamedTuple
import zlib

from experiments.preparation import documents
from experiments.preparation import state
from experiments.preparation.encoding import Encoded
from spdf_jax.data import corpora
from spdf_jax.data import tokenizer_files
from spdf_jax.data.corpora import Corpus

_CHUNK = 1 << 22  # Bytes copied at a time.

DIVISIBLE = ('.jsonl',)
"""Suffixes of files that are divided between shards, at line breaks."""


class FilePart(NamedTuple):
  """A file, or a range of its lines.

  Attributes:
    file: The file.
    start: Byte offset; the first line that starts here or later is the first.
    stop: Byte offset; lines that start here or later are not included. `None`:
      the end of the file.
  """

  file: Path
  start: int = 0
  stop: int | None = None


class Shard(NamedTuple):
  """One of several shards of a corpus.

  Attributes:
    number: Number of the shard, from 1.
    total: Number of shards.
  """

  number: int
  total: int

  def __str__(self) -> str:
    return f'{self.number}/{self.total}'

  @property
  def folder(self) -> str:
    """Name of the shard's folder."""
    return f'{self.number}-of-{self.total}'


def parse_shard(text: str) -> Shard:
  """Parses a shard written as `'i/n'`, with i from 1 to n.

  Args:
    text: The text.

  Returns:
    The shard.

  Raises:
    ValueError: the text does not have that form.

  Example:
    >>> parse_shard('2/3')
    Shard(number=2, total=3)
  """
  match = re.fullmatch(r'(\d{1,6})/(\d{1,6})', text)
  shard = Shard(int(match[1]), int(match[2])) if match else Shard(0, 0)
  if not 1 <= shard.number <= shard.total:
    raise ValueError(
        f'shard={text!r} is not i/n with i from 1 to n; give 1/3, 2/3 and 3/3,'
        ' for example.'
    )
  return shard


def spans_of(
    files: Sequence[Path], sizes: Sequence[int], shard: Shard
) -> list[FilePart]:
  """Returns the files, and ranges of files, of a shard.

  The files are concatenated and cut into equal ranges of bytes. A line of a
  `DIVISIBLE` file belongs to the shard that contains its first byte, any other
  file as a whole to the shard that contains its first byte, and empty files at
  the end to the last shard. So all shards, in order, contain every document
  once, in the order of the files. A shard may be empty if there are few files
  that cannot be divided.

  Args:
    files: All files, in order.
    sizes: Number of bytes of each file.
    shard: The shard.

  Returns:
    Spans in order.

  Example:
    >>> files = [Path('a.jsonl'), Path('b.txt')]
    >>> [(s.file.name, s.start, s.stop)
    ...  for s in spans_of(files, [80, 20], Shard(1, 2))]
    [('a.jsonl', 0, 50)]
    >>> [(s.file.name, s.start, s.stop)
    ...  for s in spans_of(files, [80, 20], Shard(2, 2))]
    [('a.jsonl', 50, 80), ('b.txt', 0, None)]
  """
  total = sum(sizes)
  low = total * (shard.number - 1) // shard.total
  high = total * shard.number // shard.total
  spans, offset = [], 0
  for file, size in zip(files, sizes):
    start, stop = max(low - offset, 0), min(high - offset, size)
    if file.suffix in DIVISIBLE:
      if start < stop:
        spans.append(FilePart(file, start, stop))
    elif low <= offset < high or (
        offset == total and shard.number == shard.total
    ):
      spans.append(FilePart(file))
    offset += size
  return spans


def shards_in(output: Path) -> dict[Shard, Path]:
  """Returns the folders of the shards in the output folder of a corpus."""
  folders = {}
  for folder in (output / 'partial').glob('*-of-*'):
    name = re.fullmatch(r'(\d{1,6})-of-(\d{1,6})', folder.name)
    if name and folder.is_dir():
      folders[Shard(int(name[1]), int(name[2]))] = folder
  return dict(sorted(folders.items()))


def unfinished_shards(
    output: str | os.PathLike[str], total: int
) -> list[Shard]:
  """Returns the shards of `total` that are not finished in an output folder."""
  folders = shards_in(Path(output).expanduser())

  def is_finished(shard: Shard) -> bool:
    path = folders.get(shard, Path()) / 'state.json'
    return path.exists() and bool(
        state.read_state(path, f'delete {path.parent}.').get('finished')
    )

  wanted = [Shard(number, total) for number in range(1, total + 1)]
  return [shard for shard in wanted if not is_finished(shard)]


def check_shards(output: Path, shard: Shard | None) -> None:
  """Checks that an output folder holds no other division of the input.

  Args:
    output: Folder of the corpus.
    shard: The shard to prepare; `None`: the whole input.

  Raises:
    ValueError: the folder holds shards of a division into another number, or
      shards although the whole input is to be prepared, or part of a corpus
      that is prepared without shards.
  """
  present = shards_in(output)
  others = [
      other for other in present if shard is None or other.total != shard.total
  ]
  if others:
    raise ValueError(
        f'output={str(output)!r} holds shard {others[0]} of a corpus; prepare'
        f' the rest of its {others[0].total} shards and join them, or give'
        ' another folder.'
    )
  # Beside shards, it is that of a join that was killed, which continues.
  begun = not present and (output / 'partial' / 'state.json').exists()
  if shard is not None and begun:
    raise ValueError(
        f'output={str(output)!r} holds the beginning of a corpus that is not'
        f' divided into shards; finish it without shard={shard}, or give'
        ' another folder.'
    )


def join_shards(
    output: str | os.PathLike[str], *, max_faults: float | None = None
) -> Corpus:
  """Joins the shards of a corpus, and removes them.

  The corpus is token for token, and by its fingerprint, the one that
  `prepare_files` writes from the whole input. Until the end, the shards and the
  corpus exist side by side, so that the folder takes twice the space. After a
  kill, the same call continues. A corpus that was joined before is opened.

  Args:
    output: Folder of the corpus, with all shards in its folder `partial`, as
      `prepare_shard` writes them.
    max_faults: Largest share of faulty documents; by default that of the
      shards.

  Returns:
    The corpus.

  Raises:
    ValueError: a shard is missing, not finished, damaged, duplicated or of
      another input, a split is empty, or too many documents are faulty.
  """
  output = Path(output).expanduser()
  folders = shards_in(output)
  if not folders:
    if (output / 'partial').exists() or not (output / 'train.json').exists():
      raise ValueError(
          f'output={str(output)!r} holds no shards of a corpus; prepare them'
          ' with shard=1/n to n/n.'
      )
    state.remove_leftover(output)
    return corpora.open_corpus(output)  # Joined before.
  states = _read_states(output, folders)
  made_from = dict(next(iter(states.values()))['made_from'])
  del made_from['shard']
  work = state.Unfinished(output, made_from)
  tokenizer = work.tokenizer(
      lambda: tokenizer_files.load_tokenizer(
          next(iter(folders.values())) / 'tokenizer.json'
      )
  )
  for shard, saved in states.items():
    if saved['tokenizer'] != tokenizer.fingerprint:
      raise ValueError(
          f'shard {shard} in {folders[shard]} has another tokenizer than the'
          ' others; delete this folder and prepare the shard again with the'
          ' libraries that the others used.'
      )
  if not work.state.get('joined'):
    positions = [saved['position'] for saved in states.values()]
    skipped: Counter[str] = Counter()
    for position in positions:
      skipped.update(position['skipped'])
    documents.check_faults(
        skipped, sum(position['documents'] for position in positions),
        max(saved['max_faults'] for saved in states.values())
        if max_faults is None else max_faults, None, done=True,
    )
    for shard, saved in states.items():
      _append(work, folders[shard], saved)
    work.state['joined'] = True
    work.save()
  return work.finish(tokenizer)


def _read_states(
    output: Path, folders: dict[Shard, Path]
) -> dict[Shard, dict[str, Any]]:
  """Reads the states of all shards; raises ValueError unless they fit."""
  total = next(iter(folders)).total
  states: dict[Shard, dict[str, Any]] = {}
  for shard, folder in folders.items():
    if shard.total != total:
      raise ValueError(
          f'output={str(output)!r} holds shards of two divisions, into {total}'
          f' and into {shard.total}; delete those of one division.'
      )
    path = folder / 'state.json'
    mend = f'delete {folder} and prepare shard {shard} again.'
    states[shard] = state.read_state(path, mend) if path.exists() else {}
    if not states[shard].get('finished'):
      raise ValueError(
          f'shard {shard} in {folder} is not finished; run the command that'
          f' prepares shard {shard} again, then join.'
      )
    made_from = states[shard]['made_from']
    if made_from['shard'] != str(shard):
      raise ValueError(
          f'{folder} holds shard {made_from["shard"]}, not shard {shard}, so'
          f' that shard {made_from["shard"]} would be there twice; {mend}'
      )
    first = next(iter(states.values()))['made_from']
    different = state.differences(
        made_from | {'shard': ''}, first | {'shard': ''}
    )
    if different:
      raise ValueError(
          f'shard {shard} in {folder} was prepared differently than shard'
          f' {next(iter(states))} (other {different}); delete one of them and'
          ' prepare it again with the arguments of the other.'
      )
  missing = [
      str(Shard(number, total)) for number in range(1, total + 1)
      if Shard(number, total) not in folders
  ]
  if missing:
    raise ValueError(
        f'output={str(output)!r} has no shard {", ".join(missing)}; prepare'
        ' what is missing, or copy its folder to partial, then join.'
    )
  return states


def _append(
    work: state.Unfinished, folder: Path, saved: dict[str, Any]
) -> None:
  """Appends the tokens of a shard; raises ValueError if they were changed."""
  position = work.state['position']
  done = saved['position']
  position = dict(
      file=position['file'] + done['file'], items=0,
      skipped=dict(Counter(position['skipped']) + Counter(done['skipped'])),
      documents=position['documents'] + done['documents'], split=None,
  )
  for split in corpora.SPLITS:
    counts = saved['splits'][split]
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
          f' {folder} and prepare this shard again.'
      )
    work.append(
        {split: Encoded(b'', counts['documents'], counts['bytes'])}, position
    )
