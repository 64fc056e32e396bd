"""METEOR 1.5, computed by its authors' Java program."""

from collections.abc import Iterable, Sequence
import os
from pathlib import Path
import shutil
import subprocess
import tempfile


def why_no_meteor(jar: str | os.PathLike[str] | None) -> str | None:
  """Returns the reason why METEOR cannot run, if there is one.

  There is no fallback: no other program computes the same score.

  Args:
    jar: Path of `meteor-1.5.jar`, with `data/paraphrase-en.gz` beside it.

  Returns:
    One sentence, or None if METEOR can run.

  Example:
    >>> why_no_meteor(None)
    'METEOR needs its Java program: give the path of meteor-1.5.jar.'
  """
  if not jar:
    return 'METEOR needs its Java program: give the path of meteor-1.5.jar.'
  jar = Path(jar)
  for path in (jar, jar.parent / 'data' / 'paraphrase-en.gz'):
    if not path.is_file():
      return (
          f'METEOR needs {path}, which is missing; unpack meteor-1.5.tar.gz '
          'and give the path of its jar.'
      )
  if shutil.which('java') is None:
    return 'METEOR needs `java`, which is not on the path; install Java.'
  return None


def meteor(
    hypotheses: Sequence[str],
    references: Sequence[Sequence[str]],
    *,
    jar: str | os.PathLike[str],
) -> float:
  """Computes METEOR 1.5 for normalized English (`-l en -norm -r N`).

  Args:
    hypotheses: One generation for each input.
    references: One or more references of each hypothesis.
    jar: Path of `meteor-1.5.jar`, with `data/paraphrase-en.gz` beside it.

  Returns:
    The final score, 0 to 1.

  Raises:
    RuntimeError: a file or `java` is missing, or the program fails.

  References:
    Denkowski and Lavie 2014, "Meteor Universal".

  Example:
    >>> meteor(['a'], [['a']], jar='missing.jar')
    Traceback (most recent call last):
    ...
    RuntimeError: METEOR needs missing.jar, which is missing; unpack \
meteor-1.5.tar.gz and give the path of its jar.
  """
  reason = why_no_meteor(jar)
  if reason:
    raise RuntimeError(reason)
  count = max(map(len, references))
  padded = (
      reference
      for group in references
      for reference in [*group, *[''] * (count - len(group))]
  )
  with tempfile.TemporaryDirectory() as folder:
    answers, targets = Path(folder, 'hypotheses'), Path(folder, 'references')
    _write_lines(answers, hypotheses)
    _write_lines(targets, padded)
    done = subprocess.run(
        ['java', '-Xmx2G', '-jar', str(Path(jar)), str(answers), str(targets),
         '-l', 'en', '-norm', '-r', str(count)],
        capture_output=True, text=True, check=False,
    )
  last = done.stdout.strip().rpartition('\n')[2]
  if done.returncode or not last.startswith('Final score:'):
    raise RuntimeError(
        f'METEOR ({jar}) failed with status {done.returncode}; its output ends '
        f'with: {(done.stderr or done.stdout).strip()[-300:]}'
    )
  return float(last.split()[-1])


def _write_lines(path: Path, texts: Iterable[str]) -> None:
  # A line break within a text would shift all following lines.
  with path.open('w', encoding='utf-8') as file:
    for text in texts:
      file.write(' '.join(text.split()) + '\n')
