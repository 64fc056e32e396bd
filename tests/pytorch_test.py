"""PyTorch computes the logits of our model, so that their times compare."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sparse_params import make_sparse_params

from experiments.benchmarks import pytorch
from experiments.benchmarks.machine import cores
from spdf_jax import models
from spdf_jax.data import Batch
from spdf_jax.evaluation import CachedModel

CONFIG = models.GPTConfig(
    vocab_size=40, n_layers=2, n_heads=2, d_model=16, d_ff=64, max_length=12
)


def are_contiguous(tensors):
  return all(x.is_contiguous() for x in jax.tree.leaves(tensors))


@pytest.mark.slow
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_matrices_of_decoding_are_contiguous_as_linear_reads_them(dtype):
  pytest.importorskip('torch')
  params, _ = make_sparse_params(CONFIG, 0.5)
  assert are_contiguous(pytorch.convert(params, dtype))


@pytest.mark.slow
def test_a_training_step_uses_contiguous_matrices_and_all_cores():
  torch = pytest.importorskip('torch')
  params, _ = make_sparse_params(CONFIG, 0.5)
  model = pytorch.create_model(CONFIG, params)
  assert are_contiguous(list(model.parameters()))
  torch.set_num_threads(cores() + 1)
  tokens = np.zeros((1, 4), np.int32)
  pytorch.create_step(
      CONFIG, params, Batch(tokens, tokens, None), dtype='float32',
      is_compiled=False, learning_rate=1e-3, weight_decay=0.0, b1=0.9, b2=0.99,
      eps=1e-8, clip_norm=1.0,
  )
  assert torch.get_num_threads() == cores()


@pytest.mark.slow
@pytest.mark.parametrize('dtype, tolerance', [
    ('float32', 1e-5), ('bfloat16', 5e-2)
])
def test_pytorch_decodes_the_same_model(dtype, tolerance):
  pytest.importorskip('torch')
  params, _ = make_sparse_params(CONFIG, 0.5)
  decoder = CachedModel(models.model_of(
      dataclasses.replace(CONFIG, dtype='float32')
  ))
  cache = decoder.create_cache(3, 12)
  wanted, _ = decoder(
      params, cache, jnp.zeros((3, 1), jnp.int32), jnp.full((3, 1), 5)
  )
  tensors = pytorch.convert(params, dtype)
  step = pytorch.decoding(CONFIG, tensors, 3, context=5, length=12)
  for _ in range(2):  # A step leaves the cache as it is for the next one.
    found = step().float().numpy()
    scale = np.abs(wanted).max()
    np.testing.assert_allclose(
        found, np.asarray(wanted)[:, 0], rtol=0, atol=tolerance * scale
    )
