"""Tests the papers' claims by runs, or fills their tables from finished ones.

  python -m experiments.reproduce --scale=fair --data=DIR
  python -m experiments.reproduce --table=spdf --runs=sweeps/,runs/

--scale: `smoke` takes minutes and gives no verdicts; `fair` takes a night on
two cores; `small` is for one GPU, where runs of one size train in one program;
with --minutes=N it saves and stops after N minutes. DIR holds books/, e2e/ and
webnlg17/; smoke reads Python's own library. What is compared, and when a claim
holds, was written before any run that judges, see
experiments/results/PROTOCOL.md. Runs go to --workdir, one on each core; stopped
or killed, the same command goes on, and finished runs are not trained again.
The table, results.json and a figure go to --output; --report writes them from
what has finished so far.

--table: a run's config, and those of the runs it started from, say which cells
it fills; what it scored is read from the JSON of experiments.evaluate --output,
wherever it lies in these folders, and from the test.json of sweeps. Each cell
has the mean over seeds ± their deviation beside the printed value, or why it is
empty.
"""

import dataclasses
import math
import os
import pathlib
import time

from absl import app
from absl import flags
from absl import logging

from experiments import compilation_cache
from experiments import console
from experiments.papers import reproduction
from experiments.papers.paper_claims import CLAIMS
from experiments.papers.replica_groups import Limits
from experiments.papers.scales import SCALES
from spdf_jax.analysis import paper_tables
from spdf_jax.names import lookup

_TABLE = flags.DEFINE_string(
    'table', None, f'One of {", ".join(paper_tables.RESULTS)}.'
)
_RUNS = flags.DEFINE_list(
    'runs', None,
    'With --table: workdirs of runs, or folders that hold some, by commas.',
)
_SCALE = flags.DEFINE_string('scale', None, f'One of {", ".join(SCALES)}.')
_CLAIMS = flags.DEFINE_list(
    'claims', [], 'Some of the claims only, by their keys.'
)
_REPORT = flags.DEFINE_bool(
    'report', False, 'Runs nothing: writes the results of what has finished.'
)
_DATA = flags.DEFINE_string(
    'data', os.environ.get('SPDF_DATA', ''), 'The folder of the data.'
)
_WORKDIR = flags.DEFINE_string(
    'workdir', None, 'Where runs go; by default runs/claims-SCALE.'
)
_OUTPUT = flags.DEFINE_string(
    'output', None,
    'Where results go; by default experiments/results/claims-SCALE.',
)
_WORKERS = flags.DEFINE_integer(
    'workers', 0, 'Runs at a time; 0: one on each core.', lower_bound=0
)
_MINUTES = flags.DEFINE_float(
    'minutes', None,
    'With --scale=small: saves and stops after so many minutes.',
    lower_bound=0.0,
)
_REPLICAS = flags.DEFINE_integer(
    'replicas', 0,
    'With --scale=small: the most runs in one program; 0: all on an '
    'accelerator, 8 on a CPU.', lower_bound=0,
)


def main(argv: list[str]) -> int:
  """Runs the command; returns its exit status."""
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments: {argv[1:]}')
  if bool(_TABLE.value) == bool(_SCALE.value):
    raise app.UsageError('give --scale, or --table with --runs.')
  if bool(_TABLE.value) != bool(_RUNS.value):
    raise app.UsageError('--table and --runs go together.')
  console.prepare()
  try:
    if _TABLE.value:
      print(paper_tables.report(_TABLE.value, _RUNS.value))
    else:
      test_claims(_SCALE.value)
  except (InterruptedError, KeyboardInterrupt):
    logging.warning('stopped; everything is saved, the same command goes on.')
    return 130
  except (ValueError, OSError, ImportError) as error:
    logging.error('%s', error)
    return 1
  return 0


def test_claims(name: str) -> None:
  """Runs what a scale needs, prints its table and writes the results.

  Raises:
    ValueError: the scale or a claim is unknown, data are missing, or a flag is
      for another scale.
  """
  started = time.monotonic()
  compilation_cache.prepare()
  scale = lookup('scale', name, SCALES)
  if not scale.vmapped and (_MINUTES.value is not None or _REPLICAS.value):
    raise ValueError(
        f'--minutes and --replicas are for scales whose runs train together, '
        f'not for {name!r}; leave them out, and stop it by Ctrl-C.'
    )
  for key in _CLAIMS.value:
    lookup('claim', key, CLAIMS)
  scale = dataclasses.replace(
      scale, claims=tuple(_CLAIMS.value) or scale.claims
  )
  output = pathlib.Path(_OUTPUT.value or f'experiments/results/claims-{name}')
  workdir = pathlib.Path(_WORKDIR.value or f'runs/claims-{name}')
  print(reproduction.reproduce(
      reproduction.Reproduction(name, scale, workdir, output),
      _DATA.value, _WORKERS.value, _REPORT.value,
      Limits(
          math.inf if _MINUTES.value is None else started + 60 * _MINUTES.value,
          _REPLICAS.value,
      ),
  ))
  print(f'{output}: table.md, results.json, claims.png')


if __name__ == '__main__':
  app.run(main)
