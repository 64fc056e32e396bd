"""An array of SLURM jobs that share the runs of a command."""

from collections.abc import Sequence
import os
import pathlib
import shlex
import shutil
import subprocess
import sys

from experiments.launch.ray_executor import Resources
from spdf_jax.files import refuse_url
from spdf_jax.training.metrics import write_atomically

_SCRIPT = """\
#!/bin/bash
# Written by {module}; each job of the array takes runs that no other job
# trains, until all runs of {folder} are finished. Submitted again, the array
# resumes. Five minutes before its time limit a job saves and ends. Partition,
# account and time limit can be given as options of sbatch.
#SBATCH --job-name={name}
#SBATCH --array=1-{jobs}
#SBATCH --ntasks=1
#SBATCH --cpus-per-task={cpus}
{gpus}#SBATCH --signal=B:TERM@300
#SBATCH --requeue
#SBATCH --output={output}

set -euo pipefail
cd {directory}
exec {command}
"""


def submit(
    folder: pathlib.Path,
    module: str,
    argv: Sequence[str],
    jobs: int,
    resources: Resources,
) -> str:
  """Writes an array of jobs that run a command, and submits it.

  Args:
    folder: Folder of the runs, in which `array.sbatch` is written; all nodes
      share it, the current directory and the Python environment.
    module: Module of the command.
    argv: Flags of the command, which the jobs run with --executor=shared.
    jobs: Number of jobs.
    resources: Resources of each job.

  Returns:
    The output of sbatch.

  Raises:
    OSError: sbatch is not installed, or fails; the script is written.
    ValueError: the folder is a URL.
  """
  refuse_url(folder, 'workdir')
  folder = folder.absolute()
  folder.mkdir(parents=True, exist_ok=True)
  path = folder / 'array.sbatch'
  command = [sys.executable, '-m', module, *argv, '--executor=shared']
  gpus = f'#SBATCH --gpus-per-task={resources.gpus}\n' if resources.gpus else ''
  write_atomically(path, _SCRIPT.format(
      module=module, folder=folder, jobs=jobs, cpus=resources.cpus, gpus=gpus,
      name=shlex.quote(f'{module.rpartition(".")[2]}-{folder.name}'),
      output=shlex.quote(str(folder / 'slurm-%A_%a.out')),
      directory=shlex.quote(os.getcwd()), command=shlex.join(command),
  ))
  if shutil.which('sbatch') is None:
    raise OSError(
        f'sbatch is not found on this machine, so {path} is written but not '
        f'submitted; on a login node of the cluster run `sbatch '
        f'{shlex.quote(str(path))}`.'
    )
  done = subprocess.run(
      ['sbatch', str(path)], capture_output=True, text=True, check=False
  )
  if done.returncode:
    raise OSError(
        f'sbatch refuses {path} ({" ".join(done.stderr.split())}); give its '
        'options as variables such as SBATCH_PARTITION or SBATCH_ACCOUNT, or '
        'submit that file.'
    )
  return f'{done.stdout.strip()}: {path}'
