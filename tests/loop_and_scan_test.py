"""A loop over layers and a scan over them are one model, weights converted."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import slow_except

from spdf_jax import interop
from spdf_jax.models import GPTConfig
from spdf_jax.models import LlamaConfig
from spdf_jax.models import model_of
from spdf_jax.models import sparsifiable
from spdf_jax.sparsity.trees import by_name
from spdf_jax.sparsity.trees import path_name
from spdf_jax.training import token_loss

pytest.importorskip('safetensors.numpy')

CONFIGS = {
    'gpt': GPTConfig(23, 3, 2, 16, 24, 8),
    'gpt by layer': GPTConfig(23, 3, 2, 16, 24, 8, attention_by_layer=True),
    'llama': LlamaConfig(23, 3, 4, 16, 24, 8, n_kv_heads=2),
    'llama tied': LlamaConfig(23, 2, 4, 16, 24, 8, tied=True),
}
TOKENS = np.random.default_rng(0).integers(23, size=(2, 9))


@pytest.fixture(params=slow_except(['gpt'], CONFIGS))
def converted(request, tmp_path):
  """A config, and weights and mask that went to Hugging Face's layout."""
  config = CONFIGS[request.param]
  init = model_of(config).init
  shapes = jax.eval_shape(init, jax.random.key(0), TOKENS[:, :-1])['params']
  rng = np.random.default_rng(1)
  params = jax.tree.map(
      lambda x: rng.normal(0.1, 0.3, x.shape).astype(x.dtype), shapes
  )
  mask = jax.tree_util.tree_map_with_path(
      lambda path, x: rng.random(x.shape) >= 0.75
      if sparsifiable(path_name(path), x) else None,
      shapes,
  )
  interop.save_hf(tmp_path, config, params, mask)
  return interop.load_hf(tmp_path)


def evaluate(config, params, mask, with_masks):
  """Returns logits, and gradients by the names of the looped model."""
  model = model_of(config)
  masks = {'masks': mask, 'grad_masks': mask} if with_masks else {}

  def loss_fn(params):
    logits = model.apply({'params': params, **masks}, TOKENS[:, :-1])
    targets = TOKENS[:, 1:]
    return token_loss(logits, targets, np.ones(targets.shape)), logits

  params = jax.tree.map(jnp.asarray, params)
  grads, logits = jax.jit(jax.grad(loss_fn, has_aux=True))(params)
  return logits, by_name(interop.unstack_layers(grads))


@pytest.mark.parametrize('with_masks', [True])
def test_loop_and_scan_give_the_same_logits_and_gradients(
    with_masks, converted
):
  config, params, mask = converted
  logits, grads = evaluate(config, params, mask, with_masks)
  scanned_logits, scanned_grads = evaluate(
      dataclasses.replace(config, scan_layers=True),
      interop.stack_layers(params),
      interop.stack_layers(mask),
      with_masks,
  )
  np.testing.assert_allclose(scanned_logits, logits, rtol=1e-5, atol=1e-5)
  assert scanned_grads.keys() == grads.keys()
  masks = by_name(mask)
  largest = max(np.abs(grad).max() for grad in grads.values())
  for path, grad in grads.items():
    # Softmax does not see the bias of keys: its gradient is rounding.
    scale = max(np.abs(grad).max(), 1e-3 * largest)
    np.testing.assert_allclose(scanned_grads[path], grad, atol=1e-5 * scale)
    if with_masks and path in masks:
      assert not np.any(scanned_grads[path][~masks[path]])
      assert not np.any(grad[~masks[path]])


def test_layers_in_another_order_are_another_model(converted):
  config, params, mask = converted
  scanned = interop.stack_layers(params)
  turned = scanned | {'h': jax.tree.map(lambda x: x[::-1], scanned['h'])}
  scan = dataclasses.replace(config, scan_layers=True)
  logits = [
      evaluate(scan, p, interop.stack_layers(mask), False)[0]
      for p in (scanned, turned)
  ]
  assert np.abs(logits[0] - logits[1]).max() > 1e-2
