"""Every optimizer and transformation of optax, inside and around `sparsify`.

  python tests/optimizer_matrix_test.py

measures them all, some minutes, and writes the tables of
`experiments/guides/optimizers.md`.
"""

import functools
import inspect
import pathlib
import re

import jax
import optax
from optax_transformations import INITIAL
from optax_transformations import loss_fn
from optax_transformations import OF_A_FUNCTION
from optax_transformations import OPTIMIZERS
from optax_transformations import PARTS
from optax_transformations import PER_EXAMPLE
from optax_transformations import WRAPPERS
from optax_transformations import X
from optax_transformations import Y
import pytest

import spdf_jax as spdf

GUIDE = pathlib.Path(__file__).parents[1].joinpath(
    'experiments', 'guides', 'optimizers.md'
)
STEPS = 12
KEPT = {'a': 32, 'b': 16}
ALGORITHMS = {
    'static': lambda: spdf.static(0.75),
    'RigL': lambda: spdf.rigl(0.75, update_every=3, update_until=9),
}


def outcome(make_tx, *, per_example=False, paired=False):
  """Trains; returns 'kept', 'lost', 'diverges', or 'error' if it cannot."""
  try:
    return _outcome(make_tx(), per_example, paired)
  except (AttributeError, TypeError, ValueError):
    return 'error'


def _outcome(tx, per_example, paired):
  tx = optax.with_extra_args_support(tx)
  fast = lambda params: params.fast if paired else params
  # A line search passes on to it the arguments that it does not know.
  value_fn = lambda params, grad_fn=None, obj_fn=None: loss_fn(params)
  extra = dict(
      grad_fn=lambda params, _: jax.grad(loss_fn)(params), obj_fn=loss_fn,
      value_fn=value_fn,
  )

  # Programs this small are compiled far longer than they run.
  @functools.partial(
      jax.jit, compiler_options={'xla_backend_optimization_level': 0}
  )
  def step(params, state):
    value, grad = jax.value_and_grad(loss_fn)(fast(params))
    grads = grad
    if per_example:
      grads = jax.vmap(jax.grad(loss_fn), (None, 0, 0))(params, X, Y)
    updates, state = tx.update(
        grads, state, params, value=value, grad=grad, **extra
    )
    return optax.apply_updates(params, updates), state, value

  pair = optax.LookaheadParams.init_synced if paired else lambda params: params
  state = tx.init(pair(INITIAL))
  params = pair(spdf.apply_mask(INITIAL, spdf.get_mask(state)))
  values = []
  for _ in range(STEPS):
    params, state, value = step(params, state)
    values.append(float(value))
    if not exact(*jax.device_get((params, spdf.get_mask(state)))):
      return 'lost'
  return 'kept' if max(values) < 10 * values[0] else 'diverges'


def exact(params, mask):
  """Whether counts are exact and pruned weights are exactly zero."""
  trees = params if isinstance(params, optax.LookaheadParams) else [params]
  masks = {
      name: m.astype(bool) for name, m in mask.items() if m is not None
  }
  return all(
      int(m.sum()) == KEPT[name] and not tree[name][~m].any()
      for tree in trees for name, m in masks.items()
  )


@functools.cache
def inside(name):
  """Returns the outcomes, of static and RigL, inside `sparsify`."""
  if name in OPTIMIZERS:
    make_inner = OPTIMIZERS[name]
  elif name in PARTS:
    make_inner = lambda: optax.chain(PARTS[name](), optax.scale(-0.01))
  else:
    make_inner = lambda: WRAPPERS[name](optax.adam(0.01))
  return tuple(
      outcome(
          lambda make=make: spdf.sparsify(make_inner(), make(), key=0),
          per_example=name in PER_EXAMPLE,
      )
      for make in ALGORITHMS.values()
  )


@functools.cache
def outside(name):
  """Returns the outcomes around `sparsify`, or after it in a chain."""
  def make_tx(algorithm):
    tx = spdf.sparsify(optax.adam(0.01), algorithm, key=0)
    if name in PARTS:
      return optax.chain(tx, PARTS[name]())
    return WRAPPERS[name](tx)

  outcomes = (
      outcome(
          lambda make=make: make_tx(make()),
          paired=name.startswith('lookahead'),
      )
      for make in ALGORITHMS.values()
  )
  # Where a part sets the size of updates, the loss tells nothing of zeros.
  return tuple('kept' if found == 'diverges' else found for found in outcomes)


def render():
  """Returns the table of what was measured."""
  lines = [
      '| place | static | RigL | transformations of optax |',
      '|---|---|---|---|',
  ]
  for place, measure, names in (
      ('optimizer inside', inside, OPTIMIZERS),
      ('wrapper inside', inside, WRAPPERS),
      ('part inside', inside, PARTS),
      ('wrapper around', outside, WRAPPERS),
      ('after, in a chain', outside, PARTS),
  ):
    groups = {}
    for name in names:
      groups.setdefault(measure(name), []).append(f'`{name}`')
    for outcomes, group in sorted(groups.items()):
      lines.append(
          f'| {place} | {" | ".join(outcomes)} | {", ".join(sorted(group))} |'
      )
  return '\n'.join(lines)


_BLOCK = re.compile(r'(<!-- measured -->\n).*?(?=\n<!-- end -->)', re.S)


def constructors():
  """Yields the names of functions that return a transformation."""
  for prefix, module in (('', optax), ('contrib.', optax.contrib)):
    for name, made in inspect.getmembers(module, callable):
      made = getattr(made, 'func', made)  # Some are partial functions.
      if inspect.isfunction(made) and not name.startswith('_'):
        result = inspect.signature(made).return_annotation
        if 'GradientTransformation' in str(result):
          yield prefix + name


def test_every_transformation_of_optax_is_listed():
  listed = {name.split(',')[0] for name in (
      *OPTIMIZERS, *PARTS, *WRAPPERS, *OF_A_FUNCTION
  )}
  assert listed == {*constructors(), 'MultiSteps'}


def test_the_guide_has_them_all():
  shown = re.findall(r'`([^`]+)`', _BLOCK.search(GUIDE.read_text())[0])
  expected = [*OPTIMIZERS, *2 * [*PARTS], *2 * [*WRAPPERS]]
  assert sorted(shown) == sorted(expected)


def test_acprop_needs_a_clip_under_rigl():
  def make_tx(*clip):
    inner = optax.chain(
        optax.contrib.scale_by_acprop(), *clip,
        optax.scale_by_learning_rate(0.01),
    )
    return spdf.sparsify(inner, ALGORITHMS['RigL'](), key=0)

  assert outcome(make_tx) == 'diverges'
  assert outcome(lambda: make_tx(optax.clip(10.0))) == 'kept'


def test_private_gradients_are_aggregated_before_sparsify():
  def make_tx():
    return optax.chain(
        PARTS['contrib.differentially_private_aggregate'](),
        spdf.sparsify(optax.sgd(0.01), ALGORITHMS['RigL'](), key=0),
    )

  assert outcome(make_tx, per_example=True) == 'kept'


@pytest.mark.slow
@pytest.mark.parametrize('name', [*OPTIMIZERS, *PARTS])
def test_zeros_and_counts_are_exact_inside(name):
  expected = {
      'contrib.acprop': ('kept', 'diverges'),
      'contrib.scale_by_acprop': ('kept', 'diverges'),
      **dict.fromkeys(PER_EXAMPLE, ('kept', 'error')),
  }
  assert inside(name) == expected.get(name, ('kept', 'kept'))


@pytest.mark.slow
def test_the_guide_shows_what_was_measured():
  shown = _BLOCK.search(GUIDE.read_text())[0].split('\n', 1)[1]
  assert shown == render(), 'run python tests/optimizer_matrix_test.py'


if __name__ == '__main__':
  GUIDE.write_text(
      _BLOCK.sub(lambda block: block[1] + render(), GUIDE.read_text())
  )
