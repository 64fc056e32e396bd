# SPDX-License-Identifier: Apache-2.0
"""Training: config, plan, run, step, loop, checkpoints."""

from spdf_jax.training.checkpoint_files import read_params
from spdf_jax.training.config import parse
from spdf_jax.training.config import parse_phases
from spdf_jax.training.config import RunConfig
from spdf_jax.training.densified import densify_checkpoint
from spdf_jax.training.identity import MismatchError
from spdf_jax.training.loop import Interrupted
from spdf_jax.training.loop import train
from spdf_jax.training.losses import Loss
from spdf_jax.training.losses import NotFinite
from spdf_jax.training.losses import token_loss
from spdf_jax.training.matmul import sparse_steps
from spdf_jax.training.optimizers import adamw
from spdf_jax.training.phases import Phase
from spdf_jax.training.plan import create_plan
from spdf_jax.training.plan import Plan
from spdf_jax.training.run import Run
from spdf_jax.training.step import create_state
from spdf_jax.training.step import train_step
from spdf_jax.training.step import TrainState
from spdf_jax.training.workdir import find_checkpoint

__all__ = [
    'Interrupted',
    'Loss',
    'MismatchError',
    'NotFinite',
    'Phase',
    'Plan',
    'Run',
    'RunConfig',
    'TrainState',
    'adamw',
    'create_plan',
    'create_state',
    'densify_checkpoint',
    'find_checkpoint',
    'parse',
    'parse_phases',
    'read_params',
    'sparse_steps',
    'token_loss',
    'train',
    'train_step',
]
