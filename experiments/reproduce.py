"""Tests the papers' claims by runs, or fills their tables from finished ones.

  python -m experiments.reproduce --scale=fair --data=DIR
  python -m experiments.reproduce --race --data=DIR
  python -m experiments.reproduce --table=spdf --runs=sweeps/,runs/

--scale: `smoke` takes minutes and gives no verdicts; `fair` takes a night on
two cores; `small` is for one GPU, where runs of one size train in one program;
with --minutes=N it saves and stops after N minutes. DIR holds books/, e2e/ and
webnlg17/; smoke reads Python's own library. What is compared, and when a claim
holds, was written before any run that judges, see
experiments/results/PROTOCOL.md. Runs go to --workdir, one on each core; stopped
or killed, the same command goes on, and finished runs are not trained again.
The table, results.json and a figure go to --output; --report writes them from
what has finished so far, and --costs also times the arms' steps and draws
losses over FLOPs and seconds.

--race: dense and sparse pre-training for equal seconds, one run at a time on
all cores; some five hours in all, which go on from one another too.

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

from experiments.launch import compilation_cache
from experiments.launch import console
from experiments.papers import paper_tables
from experiments.papers import race
from experiments.papers import reproduction
from experiments.papers.paper_claims import CLAIMS
from experiments.papers.replica_groups import Limits
from experiments.papers.scales import SCALES
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
_COSTS = flags.DEFINE_bool(
    'costs', False, 'With --report: times steps and draws costs.png.'
)
_RACE = flags.DEFINE_bool(
    'race', False, 'Runs the race by the clock; needs idle cores.'
)
_DATA = flags.DEFINE_string(
    'data', os.environ.get('SPDF_DATA', ''), 'The folder of the data.'
)
_WORKDIR = flags.DEFINE_string(
    'workdir', None, 'Where runs go; by default runs/claims-SCALE or runs/race.'
)
_OUTPUT = flags.DEFINE_string(
    'output', None,
    'Where results go; by default experiments/results/claims-SCALE, or race.',
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
  if bool(_TABLE.value) + bool(_SCALE.value) + _RACE.value != 1:
    raise app.UsageError('give --scale, --race, or --table with --runs.')
  if bool(_TABLE.value) != bool(_RUNS.value):
    raise app.UsageError('--table and --runs go together.')
  console.prepare()
  try:
    if _TABLE.value:
      print(paper_tables.report(_TABLE.value, _RUNS.value))
    elif _RACE.value:
      compilation_cache.prepare()
      workdir, output = _folders('race')
      print(race.race(_DATA.value, workdir, output))
      print(f'{output}: table.md, race.png, width-*.json')
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
  workdir, output = _folders(f'claims-{name}')
  reproduced = reproduction.Reproduction(name, scale, workdir, output)
  print(reproduction.reproduce(
      reproduced, _DATA.value, _WORKERS.value, _REPORT.value,
      Limits(
          math.inf if _MINUTES.value is None else started + 60 * _MINUTES.value,
          _REPLICAS.value,
      ),
  ))
  print(f'{output}: table.md, results.json, claims.png')
  if _COSTS.value:
    reproduction.draw_costs(reproduced, _DATA.value)
    print(f'{output}: costs.png')


def _folders(name: str) -> tuple[pathlib.Path, pathlib.Path]:
  """Returns the folders of runs and of results."""
  return (
      pathlib.Path(_WORKDIR.value or f'runs/{name}'),
      pathlib.Path(_OUTPUT.value or f'experiments/results/{name}'),
  )


if __name__ == '__main__':
  app.run(main)
