"""Pruned Llamas equal those of PyTorch code that observes transformers."""

import numpy as np
import pytest

from spdf_jax import interop
from spdf_jax import models
from spdf_jax.sparsity import one_shot
from spdf_jax.sparsity.trees import by_name

pytestmark = pytest.mark.slow
torch = pytest.importorskip('torch', reason='torch is not installed')
transformers = pytest.importorskip(
    'transformers', reason='transformers is not installed'
)

TOKENS = np.random.default_rng(7).integers(67, size=(16, 24))
SPARSITY = 0.5


def make_llama():
  torch.manual_seed(0)
  return transformers.LlamaForCausalLM(transformers.LlamaConfig(
      vocab_size=67, max_position_embeddings=24, hidden_size=32,
      num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
      intermediate_size=48, initializer_range=0.15, bos_token_id=None,
      eos_token_id=None,
  )).eval()


def wanda(w, x):
  """Prunes the weights [outputs, inputs] of the least |w| ‖x‖ of each row."""
  scores = w.abs() * x.norm(dim=0)
  number = int(SPARSITY * w.shape[1])
  return w.scatter(1, scores.argsort(dim=1)[:, :number], 0.0)


def sparsegpt(w, x):
  """Prunes all columns as one block, and updates those to the right."""
  w = w.double()
  hessian = x.double().T @ x.double()
  hessian += 0.01 * hessian.diag().mean() * torch.eye(len(hessian))
  root = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)
  saliency = (w / root.diag()) ** 2
  pruned = saliency <= saliency.flatten().kthvalue(
      int(SPARSITY * w.numel())
  ).values
  for i in range(w.shape[1]):
    kept = torch.where(pruned[:, i], 0.0, w[:, i])
    error = (w[:, i] - kept) / root[i, i]
    w[:, i:] -= error[:, None] * root[i, i:]
    w[:, i] = kept
  return w.float()


def inputs_of(model, layers):
  """The inputs of linear layers, [tokens, features]."""
  inputs = {}

  def keep(layer, args):
    inputs[layer] = args[0].flatten(0, 1)

  hooks = [layer.register_forward_pre_hook(keep) for layer in layers]
  model(torch.tensor(TOKENS))
  for hook in hooks:
    hook.remove()
  return inputs


@torch.no_grad()
def prune_theirs(model, prune):
  """Prunes block by block; inputs are those after the pruned blocks."""
  for block in model.model.layers:
    layers = [m for m in block.modules() if isinstance(m, torch.nn.Linear)]
    for layer, x in inputs_of(model, layers).items():
      layer.weight.copy_(prune(layer.weight, x))


@pytest.mark.parametrize('prune', [wanda, sparsegpt])
def test_a_llama_is_pruned_as_by_torch(prune, tmp_path):
  theirs = make_llama()
  theirs.save_pretrained(tmp_path)
  config, params, _ = interop.load_hf(tmp_path)
  pruner = one_shot.PRUNERS[prune.__name__]()
  pruned = dict(params)
  for block in models.prune_blocks(config, params, TOKENS, pruner, SPARSITY):
    pruned[block.name] = block.params
  prune_theirs(theirs, prune)
  theirs.save_pretrained(tmp_path / 'pruned')
  expected = by_name(interop.load_hf(tmp_path / 'pruned').params)
  hidden = [name for name in expected if models.sparsifiable(name, None)]
  for name in hidden:
    ours, want = np.asarray(by_name(pruned)[name]), expected[name]
    assert ((ours == 0) == (want == 0)).mean() >= 0.999
    # Columns whose masks differ have other updates of the kept weights.
    equal = ((ours == 0) == (want == 0)).all(axis=0)
    np.testing.assert_allclose(ours[:, equal], want[:, equal], atol=1e-4)
