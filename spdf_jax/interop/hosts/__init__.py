# SPDX-License-Identifier: Apache-2.0
"""Sparse training in the training loops of other libraries."""

from spdf_jax.interop.hosts.updater_configs import create_updater_from_config
from spdf_jax.interop.hosts.updaters import Updater

__all__ = ['Updater', 'create_updater_from_config']
