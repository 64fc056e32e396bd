"""One-shot pruning against NumPy oracles in float64, after the papers."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spdf_jax.sparsity import counts
from spdf_jax.sparsity import one_shot
from spdf_jax.sparsity import structures
from tests.refusals import refuse
from tests.tiers import ci_except
from tests.tiers import slow_except

# Inputs, outputs, tokens, sparsity; inputs are no multiple of blocks, and of
# some layers there are fewer tokens than inputs. The Hessian of the last is
# summed and factored in three parts.
LAYERS = [
    (32, 24, 100, 0.5), (48, 16, 200, 0.75), (40, 40, 90, 0.6),
    (20, 30, 60, 0.9), (64, 10, 40, 0.5), (33, 7, 70, 0.37),
    (32, 24, 100, '2:4'), (48, 16, 200, '1:4'), (40, 12, 30, '4:8'),
    (36, 20, 80, '2:3'), (1100, 4, 1300, 0.5),
]


def draw_layer(seed):
  inputs, outputs, tokens, sparsity = LAYERS[seed]
  rng = np.random.default_rng(seed)
  mixing = rng.normal(size=(inputs, inputs)) / inputs**0.5
  x = rng.normal(size=(tokens, inputs)) @ (np.eye(inputs) + mixing)
  x *= np.exp(rng.normal(size=inputs))
  return rng.normal(size=(inputs, outputs)), x, sparsity


def statistics_of(pruner, x):
  """Returns the statistics of three batches."""
  total = 0
  for part in np.split(x, [7, 20]):
    total = pruner.statistics(jnp.asarray(part), total)
  return total


def prune(pruner, w, x, sparsity):
  """Prunes a layer by the statistics of one batch."""
  return pruner.prune(
      jnp.asarray(w), pruner.statistics(jnp.asarray(x)), sparsity
  )


def lowest(scores, number):
  """Marks the given number of lowest scores."""
  marked = np.zeros(scores.size, bool)
  marked[np.argsort(scores, axis=None, kind='stable')[:number]] = True
  return marked.reshape(scores.shape)


def magnitude_oracle(w, x, sparsity):
  if isinstance(sparsity, str):
    return mask_n_of_m(np.abs(w), sparsity)
  return ~lowest(np.abs(w), round(sparsity * w.size))


def mask_n_of_m(scores, sparsity):
  n, m = map(int, sparsity.split(':'))
  mask = np.ones(scores.shape, bool)
  for i in range(0, len(scores), m):
    for j in range(scores.shape[1]):
      mask[i:i + m, j] = ~lowest(scores[i:i + m, j], m - n)
  return mask


def wanda_oracle(w, x, sparsity):
  """Sun et al., algorithm 1: |W| times norms of inputs, within each output."""
  scores = np.abs(w) * np.linalg.norm(x, axis=0)[:, None]
  if isinstance(sparsity, str):
    return mask_n_of_m(scores, sparsity)
  mask, done = np.ones(w.shape, bool), 0
  for j in range(w.shape[1]):
    number = round(sparsity * len(w) * (j + 1)) - done
    done += number
    mask[:, j] = ~lowest(scores[:, j], number)
  return mask


def sparsegpt_oracle(w, x, sparsity, block_size=16, damping=0.01):
  """Frantar and Alistarh, algorithm 1, by plain inverses and loops."""
  w = w.copy()
  inputs, outputs = w.shape
  h = x.T @ x
  dead = np.diag(h) == 0
  h[dead, dead] = 1
  w[dead] = 0
  h += damping * np.diag(h).mean() * np.eye(inputs)
  u = np.linalg.cholesky(np.linalg.inv(h)).T
  mask, done = np.ones(w.shape, bool), 0
  for i in range(inputs):
    scores = (w / np.diag(u)[:, None]) ** 2
    if isinstance(sparsity, str):
      n, m = map(int, sparsity.split(':'))
      if i % m == 0:
        mask[i:i + m] = mask_n_of_m(scores[i:i + m], sparsity)
    elif i % block_size == 0:
      end = min(i + block_size, inputs)
      number = round(sparsity * end * outputs) - done
      done += number
      mask[i:end] = ~lowest(scores[i:end], number)
    error = np.where(mask[i], 0, w[i]) / u[i, i]
    w[i:] -= np.outer(u[i, i:], error)
    w[i] = np.where(mask[i], w[i], 0)
  return w, mask


def check_counts(mask, sparsity):
  """Checks the counts that `init.nonzero` requires."""
  structure = structures.UNSTRUCTURED
  if isinstance(sparsity, str):
    structure = structures.structure_of(sparsity)
    n, m = map(int, sparsity.split(':'))
    sparsity = 1 - n / m
  counts.check_counts({'w': mask}, {'w': sparsity}, structure)


@pytest.mark.parametrize(
    'seed',
    ci_except([6], slow_except([0, 3, 6, 8, 10], range(len(LAYERS)))),
)
def test_masks_and_weights_are_those_of_the_papers(seed):
  w, x, sparsity = draw_layer(seed)
  with jax.enable_x64(True):
    for name, oracle in (
        ('magnitude', magnitude_oracle), ('wanda', wanda_oracle)
    ):
      pruner = one_shot.PRUNERS[name]()
      pruned, mask = pruner.prune(
          jnp.asarray(w), statistics_of(pruner, x), sparsity
      )
      np.testing.assert_array_equal(mask, oracle(w, x, sparsity))
      np.testing.assert_array_equal(pruned, np.where(mask, w, 0))
      check_counts(mask, sparsity)
    pruner = one_shot.sparsegpt(block_size=16)
    pruned, mask = pruner.prune(
        jnp.asarray(w), statistics_of(pruner, x), sparsity
    )
    check_counts(mask, sparsity)
  expected, kept = sparsegpt_oracle(w, x, sparsity)
  assert (mask == kept).mean() >= 0.999
  np.testing.assert_allclose(pruned, expected, atol=1e-6)
  assert not pruned[~mask].any()


@pytest.mark.parametrize('name', one_shot.PRUNERS)
def test_float32_agrees_with_float64(name):
  w, x, sparsity = draw_layer(0)
  pruner = one_shot.PRUNERS[name]()
  oracle = dict(
      magnitude=magnitude_oracle, wanda=wanda_oracle,
      sparsegpt=lambda *layer: sparsegpt_oracle(*layer, block_size=128)[1],
  )[name]
  _, mask = prune(pruner, np.float32(w), np.float32(x), sparsity)
  assert (mask == oracle(w, x, sparsity)).mean() >= 0.999


@pytest.mark.ci
@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
@pytest.mark.parametrize('name', one_shot.PRUNERS)
def test_half_precision_is_pruned_as_its_float32_copy(name, dtype):
  w, x, sparsity = draw_layer(0)
  w, x = jnp.asarray(w, dtype), 300 * jnp.asarray(x, dtype)  # x**2 > 65504.
  pruner = one_shot.PRUNERS[name]()
  pruned, mask = prune(pruner, w, x, sparsity)
  w, x = w.astype('float32'), x.astype('float32')
  expected, kept = prune(pruner, w, x, sparsity)
  assert pruned.dtype == dtype
  np.testing.assert_array_equal(mask, kept)
  np.testing.assert_array_equal(pruned, expected.astype(dtype))


@pytest.mark.ci
def test_the_update_lowers_the_error_of_the_outputs():
  w, x, sparsity = draw_layer(1)
  errors = []
  for name in ('magnitude', 'wanda', 'sparsegpt'):
    pruned, _ = prune(one_shot.PRUNERS[name](), w, x, sparsity)
    errors.append(np.square(x @ (pruned - w)).sum())
  assert errors[0] > errors[1] > errors[2]


def test_inputs_that_are_always_zero_are_pruned():
  w, x, sparsity = draw_layer(1)
  x[:, 5] = 0
  with jax.enable_x64(True):
    pruned, mask = prune(one_shot.sparsegpt(block_size=16), w, x, sparsity)
  expected, kept = sparsegpt_oracle(w, x, sparsity)
  np.testing.assert_array_equal(mask, kept)
  np.testing.assert_allclose(pruned, expected, atol=1e-6)
  assert not mask[5].any()


@pytest.mark.ci
def test_a_hessian_without_a_factor_is_damped_more_with_a_warning(caplog):
  w = np.random.default_rng(0).normal(size=(600, 4)).astype(np.float32)
  # All entries of the Hessian are 2**24, so that elimination is exact and
  # leaves zeros, on every processor: a damping of 1e-8 is rounded away.
  x = np.full((16, 600), 2.0 ** 10, np.float32)
  prune_with = lambda damping: prune(
      one_shot.sparsegpt(damping=damping), w, x, 0.5
  )[0]
  pruned = prune_with(1e-8)
  assert np.isfinite(pruned).all()
  said = re.search(
      'has no Cholesky factor at a damping of 1e-08; that of (.*) is used',
      caplog.text,
  )
  np.testing.assert_array_equal(pruned, prune_with(float(said[1])))


@pytest.mark.parametrize('sparsity, message', [
    (1.0, 'sparsity is 1.0; it is the fraction of zeros and must be'),
    ('half', "sparsity is 'half'; give the fraction of zeros as a number"),
    ('4:2', 'n is 4 and m is 2; keep fewer than m of m weights.'),
    ('2:5', 'needs a multiple of 5 inputs, but a leaf has 32 inputs'),
])
@pytest.mark.parametrize('name', one_shot.PRUNERS)
def test_other_sparsities_are_refused(name, sparsity, message):
  w, x, _ = draw_layer(0)
  refuse(message, prune, one_shot.PRUNERS[name](), w, x, sparsity)


@pytest.mark.parametrize('name', ['wanda', 'sparsegpt'])
def test_inputs_that_are_not_finite_are_refused(name):
  w, x, sparsity = draw_layer(0)
  x[3, 4] = np.nan
  refuse('are not finite; look for NaN in the w', prune,
         one_shot.PRUNERS[name](), w, x, sparsity)
