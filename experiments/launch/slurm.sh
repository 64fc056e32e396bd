#!/bin/bash
# Trains a config on several GPU nodes under SLURM, one process per GPU:
#
#   sbatch --nodes=4 experiments/launch/slurm.sh \
#     --config=configs/quickstart.py --workdir=/shared/runs/a \
#     --config.mesh.fsdp=8
#
# Submit it from a clone whose .venv has spdf_jax and JAX for CUDA; workdir and
# clone must be on a disk that all nodes share. srun sets the processes' numbers.
# Five minutes before the time limit SLURM sends SIGTERM, on which all processes
# save and exit. Submitted again, the job resumes from the last checkpoint.
#SBATCH --job-name=spdf_jax
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --output=slurm-%j.out

set -euo pipefail
source .venv/bin/activate
srun --kill-on-bad-exit=1 python -m experiments.train --distributed=on "$@"
