"""Transformations outside `sparsify` that lose the zeros; `check` sees it."""


import jax
import optax
from optax_transformations import INITIAL
from optax_transformations import loss_fn
from optax_transformations import WRAPPERS
import pytest

import spdf_jax as spdf

STEPS = 6
OUTSIDE = {
    'scale': lambda tx: optax.chain(tx, optax.scale(0.5)),
    'apply_every': lambda tx: optax.chain(tx, optax.apply_every(2)),
    'ema': lambda tx: optax.chain(tx, optax.ema(0.9)),
    **{name: WRAPPERS[name] for name in (
        'conditionally_transform', 'lookahead', 'contrib.mechanize',
        'contrib.schedule_free',
    )},
}


def train(tx, *, paired=False, masked=False, steps=STEPS):
  """Yields the weights and the state after each step."""
  fast = lambda params: params.fast if paired else params
  pair = optax.LookaheadParams.init_synced if paired else lambda params: params

  @jax.jit
  def step(params, state):
    grads = jax.grad(loss_fn)(fast(params))
    updates, state = tx.update(grads, state, params)
    params = optax.apply_updates(params, updates)
    if masked:
      mask = spdf.get_mask(state)
      trees = params if paired else [params]
      trees = [spdf.apply_mask(tree, mask) for tree in trees]
      params = optax.LookaheadParams(*trees) if paired else trees[0]
    return params, state

  state = tx.init(pair(INITIAL))
  params = pair(spdf.apply_mask(INITIAL, spdf.get_mask(state)))
  for _ in range(steps):
    params, state = step(params, state)
    yield fast(params), state


def sparse():
  algorithm = spdf.rigl(0.75, update_every=3, update_until=9)
  return spdf.sparsify(optax.adam(0.01), algorithm, key=0)


def lost_in(params, state):
  """Returns the leaves that have pruned weights other than zero."""
  params, mask = jax.device_get((params, spdf.get_mask(state)))
  return [name for name in INITIAL if params[name][mask[name] == 0].any()]


@pytest.mark.parametrize('name', OUTSIDE)
def test_check_names_the_leaves_whose_zeros_are_lost(name):
  found = False
  tx = OUTSIDE[name](sparse())
  for params, state in train(tx, paired=name == 'lookahead'):
    lost = lost_in(params, state)
    if not lost:
      spdf.check(params, state)
      continue
    found = True
    with pytest.raises(ValueError, match=f"'{lost[0]}'"):
      spdf.check(params, state)
  assert found


def test_masking_after_every_step_restores_the_zeros():
  tx = OUTSIDE['lookahead'](sparse())
  for params, state in train(tx, paired=True, masked=True):
    assert not lost_in(params, state)


def test_sam_around_loses_the_zeros_at_its_adversarial_step():
  # It also computes with the state, which turns the mask into integers.
  (params, state), = train(WRAPPERS['contrib.sam'](sparse()), steps=1)
  assert lost_in(params, state) == ['a', 'b']
  with pytest.raises(ValueError, match='put that transformation inside'):
    spdf.check(params, state)
