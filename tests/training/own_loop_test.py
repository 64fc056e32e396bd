"""RigL in a loop of one's own, with `skip_zeros`, trains as a run does."""

import jax
import numpy as np
import optax
import pytest

import spdf_jax as spdf
from spdf_jax import models
from spdf_jax import training
from spdf_jax.accelerator import native
from spdf_jax.sparsity import trees
from tests.tiny_run import make_config
from tests.tiny_run import run_of

pytestmark = pytest.mark.ci

STEPS, EVERY = 300, 50
SPARSITY = 0.8


def rigl_run(matmul):
  """Creates a run of one phase of RigL."""
  return run_of(make_config(
      matmul=matmul,
      eval_every=EVERY, log_every=EVERY, checkpoints__every=STEPS,
      model__n_layers=2, model__d_model=32, model__d_ff=64,
      phases__order=('pretrain',),
      phases__pretrain__duration=f'{STEPS} steps',
      phases__pretrain__algorithm=dict(
          name='rigl', sparsity=SPARSITY, update_every=10, update_until=250
      ),
  ))


def weights_of_run(run, workdir):
  """Returns the weights of a run at every evaluation, and its last state."""
  weights = []

  def evaluate(step, params):
    weights.append(jax.tree.map(np.asarray, params))
    return []

  state = training.train(
      run.open(workdir), evaluators=training.Evaluators([evaluate])
  )
  assert len(weights) == STEPS // EVERY
  return weights, state


def weights_of_own_loop(run, lowering):
  """Trains on the batches of a run; returns the same, and counts traces."""
  model = models.create_model('gpt-mini', **{
      name: getattr(run.model.config, name)
      for name in ('vocab_size', 'n_layers', 'n_heads', 'd_model', 'd_ff',
                   'max_length')
  })
  tx = run.programs.optimizer
  traces = []

  def loss(params, batch):
    traces.append(None)
    logits = model.apply({'params': params}, batch.inputs)
    entropy = optax.softmax_cross_entropy_with_integer_labels(
        logits, batch.targets
    )
    return (entropy * batch.weights).sum() / batch.weights.sum()

  fast = spdf.skip_zeros(loss, lowering=lowering)

  @jax.jit
  def step(params, opt_state, batch):
    grads = jax.grad(fast)(params, batch, **spdf.get_masks(opt_state))
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  params = run.programs.init_params()
  opt_state = tx.init(params)
  params = spdf.apply_mask(params, spdf.get_mask(opt_state))
  weights = []
  for i in range(STEPS):
    params, opt_state = step(params, opt_state, run.programs.batch_at(i))
    spdf.check_zeros(params, opt_state)
    if i % EVERY == EVERY - 1:
      weights.append(jax.tree.map(np.asarray, params))
  return weights, opt_state, len(traces)


def share_of_differences(one, other):
  """Returns the share of hidden weights that only one of two models keeps."""
  hidden = spdf.where.layer_shapes(models.sparsifiable, one)
  one, other = map(trees.by_name, (one, other))
  kept = lambda weights: np.concatenate(
      [(weights[path] != 0).ravel() for path in hidden]
  )
  return np.mean(kept(one) != kept(other))


@pytest.mark.parametrize('matmul, lowering', [
    ('dense', 'reference'),
    pytest.param('native', 'native', marks=pytest.mark.skipif(
        not native.is_available(), reason='no native kernels on this machine'
    )),
])
def test_masks_and_counts_are_those_of_the_run_in_one_program(
    matmul, lowering, tmp_path
):
  run = rigl_run(matmul)
  weights, state = weights_of_run(run, tmp_path / 'run')
  own, opt_state, traces = weights_of_own_loop(run, lowering)
  assert traces == 1
  one, other = map(spdf.get_mask, (state.opt_state, opt_state))
  count = lambda mask: jax.tree.map(lambda m: int(m.sum()), mask)
  assert count(one) == count(other)
  sparsity = spdf.summarize(one, state.params).sparsity
  assert sparsity == pytest.approx(SPARSITY, abs=1e-3)
  # Gradients are summed in another order, which may break near ties
  # differently.
  assert all(
      share_of_differences(*pair) < 2e-3 for pair in zip(weights, own)
  )
  assert share_of_differences(weights[0], weights[-1]) > 0.1
