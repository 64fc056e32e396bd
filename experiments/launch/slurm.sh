#!/bin/bash
# Trains a config on several GPU nodes under SLURM, one process a GPU:
#
#   sbatch --nodes=4 experiments/launch/slurm.sh \
#     --config=configs/quickstart.py --workdir=/shared/runs/a \
#     --config.mesh.fsdp=8
#
# Submit it from the clone, in whose .venv spdf_jax is installed with JAX for
# CUDA; workdir and clone lie on a disk that all nodes share. srun tells the
# processes who they are. Sent again, it goes on from the last checkpoint; five
# minutes before its time is up SLURM has all processes save and leave.
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
