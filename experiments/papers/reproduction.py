"""Reproduction of the papers' claims at a scale: runs and results."""

from collections.abc import Iterator, Sequence
import functools
import os
import pathlib
from typing import NamedTuple

from experiments.papers import gates
from experiments.papers import paper_claims
from experiments.papers import scales
from experiments.papers.scale import Scale
from experiments.pool import data as pool_data
from experiments.pool import identity as pool_identity
from experiments.pool import processes as pool_processes
from experiments.pool import results as pool_results
from experiments.pool import worker as pool_worker
from experiments.pool.pool import Entry
from spdf_jax import files
from spdf_jax import names


class Reproduction(NamedTuple):
  """A scale, and the folders of its runs and results.

  Attributes:
    name: Name of the scale.
    scale: The scale.
    workdir: Folder of the runs.
    output: Folder of `table.md`, `results.json` and `claims.png`.
    claims: Keys of the claims whose runs are trained; empty: all of the scale.
      All claims of the scale are judged, since they share the correction of
      their families.
  """

  name: str
  scale: Scale
  workdir: pathlib.Path
  output: pathlib.Path
  claims: Sequence[str] = ()

  @property
  def entries(self) -> list[Entry]:
    """Entries of the scale, in order."""
    return self._entries(self.scale.claims)

  @property
  def trained(self) -> list[Entry]:
    """Those entries that are trained."""
    return self._entries(self.claims or self.scale.claims)

  def _entries(self, keys: Sequence[str]) -> list[Entry]:
    claims = [paper_claims.CLAIMS[key] for key in keys]
    arms = [arm for claim in claims for arm in claim.arms]
    return self.scale.entries(arms + gates.arms_of_gates(self.scale, claims))


def check_claims(
    name: str,
    claims: Sequence[str],
    data: str,
    workdir: pathlib.Path,
    output: pathlib.Path,
    report_only: bool,
    workers: int,
) -> Iterator[str]:
  """Reproduces claims at a scale; yields the report and the files' names.

  Args:
    name: A key of `SCALES`.
    claims: Keys of the claims whose runs are trained; empty: all of the scale.
    data: Folder of the data.
    workdir: Folder of the runs.
    output: Folder of the results.
    report_only: Whether only the results of finished runs are written.
    workers: Number of runs at a time; 0: one on each core.

  Raises:
    ValueError: the scale or a claim is unknown, or `reproduce` raises it.
    InterruptedError: a signal arrived; everything is saved.
  """
  scale = names.lookup('scale', name, scales.SCALES)
  for key in claims:
    names.lookup(
        'claim', key, {name: paper_claims.CLAIMS[name] for name in scale.claims}
    )
  reproduction = Reproduction(name, scale, workdir, output, claims)
  yield reproduce(reproduction, data, workers, report_only)
  written = sorted(path.name for path in output.glob('*.png'))
  yield f'{output}: {", ".join(["table.md", "results.json", *written])}'


def reproduce(
    reproduction: Reproduction,
    data: str,
    workers: int,
    report_only: bool,
) -> str:
  """Trains all unfinished runs of a scale, and judges its claims.

  Runs whose outcomes are in the results of the output folder, with the same
  identity, are not repeated. Results are written in any case, also after a
  signal or an error.

  Args:
    reproduction: The scale and its folders.
    data: Folder of the data.
    workers: Number of runs at a time; 0: one on each core.
    report_only: Whether only the results of finished runs are written.

  Returns:
    The report.

  Raises:
    ValueError: data are missing; the workdir or the output has runs of another
      protocol, or another process trains there.
    InterruptedError: a signal arrived; everything is saved.
  """
  name, scale, workdir, output, _ = reproduction
  files.refuse_url(workdir, 'workdir')
  entries = reproduction.trained
  identity_file = workdir / 'scale.json'
  if identity_file.exists():
    # Checked first, since preparing data takes minutes.
    identity = pool_identity.identify(scale, {})
    del identity['data']
    pool_identity.check_same(identity_file, identity)
  prepared = pool_data.prepare(scale, data, workdir)
  if not report_only:
    workdir.mkdir(parents=True, exist_ok=True)
    files.lock_folder(workdir, 'workdir')  # Held until the process ends.
  identity = pool_identity.identify(scale, prepared.fingerprints)
  pool_identity.check_same(identity_file, identity)
  runs = workdir / 'runs'
  known = pool_results.read_results(output, identity)
  read = lambda: pool_results.join_outcomes(
      known, pool_worker.read_outcomes(runs)
  )
  write = functools.partial(
      pool_results.write_results, output, name, scale, reproduction.entries,
      identity
  )
  done = read()
  if report_only:
    return write(done)
  tasks = pool_data.write_tasks(scale, prepared.tasks, workdir)
  runner = pool_worker.Runner(
      scale, str(runs), prepared.corpus, tasks, prepared.domains
  )
  cores = sorted(os.sched_getaffinity(0))
  workers = workers or len(cores)
  try:
    pool_processes.run_pool(
        runner, entries, done, cores, workers, scale.work
    )
  finally:
    report = write(read())
  return report
