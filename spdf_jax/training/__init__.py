# SPDX-License-Identifier: Apache-2.0
"""Training: config, plan, run, step, loop, checkpoints."""

from spdf_jax.training.checkpoints.densified import densify_checkpoint
from spdf_jax.training.checkpoints.files import read_params
from spdf_jax.training.checkpoints.identity import MismatchError
from spdf_jax.training.checkpoints.workdir import find_checkpoint
from spdf_jax.training.configs.config import parse
from spdf_jax.training.configs.config import parse_phases
from spdf_jax.training.configs.config import RunConfig
from spdf_jax.training.configs.phases import Phase
from spdf_jax.training.loop.evaluations import Evaluators
from spdf_jax.training.loop.loop import Interrupted
from spdf_jax.training.loop.loop import train
from spdf_jax.training.plan import create_plan
from spdf_jax.training.plan import Plan
from spdf_jax.training.run import Run
from spdf_jax.training.step.losses import Loss
from spdf_jax.training.step.losses import NotFinite
from spdf_jax.training.step.losses import token_loss
from spdf_jax.training.step.matmul import sparse_steps
from spdf_jax.training.step.optimizers import adamw
from spdf_jax.training.step.state import create_state
from spdf_jax.training.step.state import TrainState
from spdf_jax.training.step.step import train_step

__all__ = [
    'Evaluators',
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
