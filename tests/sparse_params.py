"""Parameters of sparse models, drawn at random."""

import jax
import numpy as np

from spdf_jax import models
from spdf_jax.sparsity.trees import path_name


def make_sparse_params(config, sparsity, seed=1):
  """Returns params that are zero off a mask, and the mask."""
  tokens = np.zeros((1, 2), np.int32)
  shapes = jax.eval_shape(
      models.model_of(config).init, jax.random.key(0), tokens
  )['params']
  rng = np.random.default_rng(seed)

  def mask_of(path, x):
    selected = models.sparsifiable(path_name(path), x) is not False
    return rng.random(x.shape) >= sparsity if selected else None

  mask = jax.tree_util.tree_map_with_path(mask_of, shapes)
  params = jax.tree.map(
      lambda m, x: (rng.normal(0, 0.5, x.shape) * (1 if m is None else m))
      .astype(np.float32), mask, shapes, is_leaf=lambda m: m is None,
  )
  return params, mask
