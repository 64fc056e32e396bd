r"""Damages files and inputs at random, and counts what passes unnoticed.

  python -m tests.fuzz --minutes=10

Targets: bits of checkpoints and corpora, files of models, runs, plans, mirrors,
races, teachers and documents, configs, and sparse products; a share of the
cases goes through commands. A case is `same` if the result is that of the sound
input, `refused` if it ends in one sentence that names a file of the case or an
argument, `accepted` if another input is valid too or a warning is logged, `raw`
if it ends in another error, `large` if it takes over 60 seconds or 1 GiB more
memory than the cases before, and `silent` if the result is wrong. The exit
status is 1 if any case is raw, large or silent; the seed and number of a case
reproduce it.
"""

import collections
from collections.abc import Callable
import contextlib
import logging as standard_logging
import pathlib
import re
import signal
import tempfile
import time
from typing import NoReturn

from absl import app
from absl import flags
import numpy as np

from tests.fuzz import inputs
from tests.fuzz import runs
from tests.tiny_run import CONFIG

_MINUTES = flags.DEFINE_float('minutes', 10, 'Time to spend.')
_SEED = flags.DEFINE_integer('seed', 0, 'Seed of the cases.')
_TARGETS = flags.DEFINE_list('targets', None, 'Targets; by default all.')
_CASE = flags.DEFINE_integer('case', None, 'Only this case.')

Target = Callable[[np.random.Generator], str]

REFUSED = (ValueError, OSError, ImportError)
_SECONDS, _BYTES = 60, 1 << 30  # Limits of a case.

TARGETS = dict(
    checkpoints=runs.fuzz_checkpoints, corpora=inputs.fuzz_corpora,
    models=inputs.fuzz_models, configs=inputs.fuzz_configs,
    runs=runs.fuzz_runs, plans=runs.fuzz_plans, mirrors=runs.fuzz_mirrors,
    races=runs.fuzz_races, teachers=runs.fuzz_teachers,
    documents=inputs.fuzz_documents, kernels=inputs.fuzz_kernels,
)


class TooSlow(BaseException):
  """An exception that no reading turns into a sentence."""


def field_names(value: object) -> set[str]:
  """Returns the names of all fields of a config."""
  if not isinstance(value, dict):
    return set()
  return set(value).union(*map(field_names, value.values()))


def peak_bytes() -> int:
  """Returns the largest resident memory since the last call."""
  status = pathlib.Path('/proc/self/status').read_text()
  with contextlib.suppress(OSError):
    pathlib.Path('/proc/self/clear_refs').write_text('5')
  return int(re.search(r'VmHWM:\s+(\d+)', status)[1]) << 10


def outcome_of(
    attack: Target, rng: np.random.Generator, causes: re.Pattern[str]
) -> tuple[str, str]:
  """Returns the outcome of one case, and its error.

  Args:
    attack: The target.
    rng: Random numbers of the case.
    causes: Names of files and arguments, one of which a sentence has.
  """
  def stop(*_) -> NoReturn:
    raise TooSlow

  signal.signal(signal.SIGALRM, stop)
  signal.alarm(_SECONDS)
  try:
    return attack(rng), ''
  except TooSlow:
    return 'large', f'over {_SECONDS} seconds'
  except REFUSED as error:
    text = str(error)
    is_sentence = '\n' not in text and causes.search(text)
    kind = type(error).__name__
    return ('refused', text) if is_sentence else ('raw', f'{kind}: {text}')
  except Exception as error:  # Every error counts.
    return 'raw', f'{type(error).__name__}: {error}'
  finally:
    signal.alarm(0)


def main(argv: list[str]) -> int:
  """Runs the command; returns its exit status."""
  del argv
  standard_logging.disable(standard_logging.INFO)
  standard_logging.getLogger().handlers = [standard_logging.NullHandler()]
  names = _TARGETS.value or list(TARGETS)
  counts = {name: collections.Counter() for name in names}
  bad = 'raw', 'large', 'silent'
  with (
      tempfile.TemporaryDirectory() as folder,
      contextlib.chdir(folder),  # Configs may name folders to write to.
  ):
    tempfile.tempdir = folder  # Folder for the tracebacks that commands write.
    for name in names:
      path = pathlib.Path(folder, name)
      path.mkdir()
      attack = TARGETS[name](path)
      words = [str(path), *(rf'\b{x}\b' for x in sorted(field_names(CONFIG)))]
      causes = re.compile('|'.join(words))
      end = time.monotonic() + 60 * _MINUTES.value / len(names)
      number = _CASE.value or 0
      while time.monotonic() < end:
        rng = np.random.default_rng([_SEED.value, number])
        before = peak_bytes()
        outcome, error = outcome_of(attack, rng, causes)
        grown = peak_bytes() - before
        if grown > _BYTES and number:
          outcome, error = 'large', f'{grown >> 20} MiB {error}'
        counts[name][outcome] += 1
        if outcome in bad or _CASE.value is not None:
          print(f'{name} case {number}: {outcome} {error[:400]}', flush=True)
        if _CASE.value is not None:
          break
        number += 1
  kinds = ('same', 'refused', 'accepted', *bad)
  print(f'{"target":12}{"cases":>8}' + ''.join(f'{k:>10}' for k in kinds))
  for name, outcomes in counts.items():
    cases = ''.join(f'{outcomes[kind]:>10}' for kind in kinds)
    print(f'{name:12}{outcomes.total():>8}{cases}')
  return int(any(c[kind] for c in counts.values() for kind in bad))


if __name__ == '__main__':
  app.run(main)
