"""SPDF, sparse then dense, against a plain loop in PyTorch."""

import functools

import jax
import numpy as np
import optax
import pytest

import spdf_jax as spdf
from spdf_jax import interop
from spdf_jax import models
from spdf_jax import training
from spdf_jax.data import Batch

pytestmark = pytest.mark.slow
torch = pytest.importorskip('torch', reason='torch is not installed')
transformers = pytest.importorskip(
    'transformers', reason='transformers is not installed'
)
safetensors = pytest.importorskip('safetensors.numpy')

V, L, STEPS = 61, 16, 3
RATE, DECAY, B1, B2, EPS, CLIP = 1e-2, 0.1, 0.9, 0.95, 1e-8, 1.0
KINDS = {
    'gpt2': dict(
        vocab_size=V, n_positions=L, n_embd=32, n_layer=2, n_head=4,
        initializer_range=0.1, bos_token_id=None, eos_token_id=None,
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
    ),
    'llama': dict(
        vocab_size=V, max_position_embeddings=L, hidden_size=32,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, initializer_range=0.1, bos_token_id=None,
        eos_token_id=None,
    ),
}


def batches():
  rng = np.random.default_rng(3)
  return rng.integers(V, size=(2 * STEPS, 4, L + 1))


def torch_losses(model, masks):
  """Sparse steps under the masks, then dense ones with a fresh optimizer."""
  named = dict(model.named_parameters())
  losses = []
  for phase_masks in (masks, {}):
    optimizer = torch.optim.AdamW(
        model.parameters(), RATE, (B1, B2), EPS, DECAY
    )
    with torch.no_grad():
      for name, mask in phase_masks.items():
        named[name] *= mask
    for _ in range(STEPS):
      tokens = torch.tensor(batches()[len(losses)])
      logits = model(tokens[:, :-1]).logits
      loss = torch.nn.functional.cross_entropy(
          logits.reshape(-1, V), tokens[:, 1:].reshape(-1)
      )
      optimizer.zero_grad()
      loss.backward()
      for name, mask in phase_masks.items():
        named[name].grad *= mask
      torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
      optimizer.step()
      losses.append(loss.item())
  return losses


@pytest.mark.parametrize('kind', KINDS)
def test_sparse_then_dense_training_equals_pytorchs(kind, tmp_path):
  torch.manual_seed(0)
  theirs = transformers.AutoModelForCausalLM.from_config(
      transformers.AutoConfig.for_model(kind, **KINDS[kind])
  )
  theirs.save_pretrained(tmp_path / 'theirs')
  config, params, _ = interop.load_hf(tmp_path / 'theirs')
  model = models.model_of(config)
  chain = optax.chain(
      optax.clip_by_global_norm(CLIP),
      optax.adamw(RATE, B1, B2, EPS, weight_decay=DECAY),
  )

  def run(params, algorithm, numbers):
    tx = spdf.sparsify(chain, algorithm, where=models.sparsifiable, key=5)
    state = training.create_state(params, tx)
    mask = spdf.get_mask(state.opt_state)
    step = jax.jit(functools.partial(
        training.train_step, apply_fn=model.apply, optimizer=tx,
        learning_rate=lambda _: RATE,
    ))
    losses = []
    for i in numbers:
      tokens = batches()[i].astype(np.int32)
      weights = np.ones((4, L), np.float32)
      batch = Batch(tokens[:, :-1], tokens[:, 1:], weights)
      state, metrics = step(state, batch)
      losses.append(float(metrics['train/loss']))
    return state.params, mask, losses

  sparse, mask, losses = run(params, spdf.static(0.75), range(STEPS))
  dense, _, rest = run(sparse, spdf.dense(), range(STEPS, 2 * STEPS))

  interop.save_hf(tmp_path / 'mask', config, params, mask)
  masks = safetensors.load_file(tmp_path / 'mask' / 'masks.safetensors')
  want = torch_losses(theirs, {
      name: torch.tensor(mask).float() for name, mask in masks.items()
  })
  np.testing.assert_allclose(losses + rest, want, rtol=1e-5)
  interop.save_hf(tmp_path / 'ours', config, dense)
  for name, actual in safetensors.load_file(
      tmp_path / 'ours' / 'model.safetensors'
  ).items():
    want = theirs.state_dict()[name].numpy()
    if name.endswith('c_attn.bias'):
      # A bias of keys does not change the softmax: its gradient is a rounding
      # error, which Adam amplifies.
      actual, want = (np.delete(x, np.s_[32:64]) for x in (actual, want))
    np.testing.assert_allclose(actual, want, atol=1e-4, err_msg=name)
