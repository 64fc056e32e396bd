"""Every optimizer and transformation of optax, inside and around `sparsify`.

  python tests/sparsity/optimizer_matrix_test.py

measures them all, some minutes, and writes the tables of
`experiments/guides/optimizers.md`. An optimizer takes no arguments, a part of
one is put before or after others in a chain, and a wrapper is a function of the
transformation that it wraps.
"""

import functools
import inspect
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spdf_jax as spdf

GUIDE = pathlib.Path(__file__).parents[2].joinpath(
    'experiments', 'guides', 'optimizers.md'
)
_normal = functools.partial(np.random.default_rng(0).standard_normal, dtype='f')
X = _normal((32, 8))
Y = np.sin(X @ _normal((8, 4)))
INITIAL = {'a': _normal((8, 16)) / 3, 'b': _normal((16, 4)) / 4}


def loss_fn(params, x=X, y=Y):
  return jnp.mean((jnp.tanh(x @ params['a']) @ params['b'] - y) ** 2)


_BY_RATE = (
    'adabelief adadelta adafactor adagrad adam adamax adamaxw adamw adan '
    'amsgrad fromage lamb lars lion nadam nadamw noisy_sgd novograd '
    'optimistic_adam optimistic_adam_v2 optimistic_gradient_descent radam '
    'rmsprop rprop sgd sign_sgd signum sm3 yogi contrib.acprop '
    'contrib.ademamix contrib.adopt contrib.madgrad contrib.muon '
    'contrib.simplified_ademamix contrib.sophia'
)
_BY_DEFAULT = (
    'lbfgs polyak_sgd contrib.cocob contrib.dadapt_adamw contrib.momo '
    'contrib.momo_adam contrib.prodigy contrib.schedule_free_adamw '
    'contrib.schedule_free_sgd'
)


def _get(name):
  return functools.reduce(getattr, name.split('.'), optax)


OPTIMIZERS = {
    **{n: functools.partial(_get(n), 0.01) for n in _BY_RATE.split()},
    **{n: _get(n) for n in _BY_DEFAULT.split()},
    'contrib.dpsgd': lambda: optax.contrib.dpsgd(0.01, 1.0, 0.1, 0),
    'contrib.galore': lambda: optax.contrib.galore(0.01, rank=2),
}
# Parts of optimizers: they come before, or after, others in a chain.
PARTS = {
    **{n: _get(n) for n in (
        'centralize identity keep_params_nonnegative normalize_by_update_norm '
        'scale_by_adadelta scale_by_adam scale_by_adamax scale_by_adan '
        'scale_by_amsgrad scale_by_belief scale_by_distance_over_gradients '
        'scale_by_lbfgs scale_by_lion scale_by_novograd '
        'scale_by_optimistic_gradient scale_by_param_block_norm '
        'scale_by_param_block_rms scale_by_radam scale_by_rms '
        'scale_by_rss scale_by_sign scale_by_sm3 scale_by_stddev '
        'scale_by_trust_ratio scale_by_yogi set_to_zero zero_nans '
        'contrib.normalize contrib.scale_by_acprop contrib.scale_by_ademamix '
        'contrib.scale_by_adopt '
        'contrib.scale_by_cocob contrib.scale_by_simplified_ademamix'
    ).split()},
    'adaptive_grad_clip': lambda: optax.adaptive_grad_clip(0.1),
    'add_decayed_weights': lambda: optax.add_decayed_weights(0.1),
    'add_noise': lambda: optax.add_noise(0.1, 0.5, key=0),
    'apply_every': lambda: optax.apply_every(2),
    'clip': lambda: optax.clip(1e-3),
    'clip_by_block_rms': lambda: optax.clip_by_block_rms(1e-3),
    'clip_by_global_norm': lambda: optax.clip_by_global_norm(1e-3),
    'ema': lambda: optax.ema(0.9),
    'freeze': lambda: optax.freeze({'a': True, 'b': False}),
    'scale': lambda: optax.scale(0.5),
    'scale_by_backtracking_linesearch': (
        lambda: optax.scale_by_backtracking_linesearch(
            5, max_learning_rate=0.5
        )
    ),
    'scale_by_learning_rate': lambda: optax.scale_by_learning_rate(0.5),
    'scale_by_polyak': lambda: optax.scale_by_polyak(max_learning_rate=0.5),
    'scale_by_rprop': lambda: optax.scale_by_rprop(0.01),
    'scale_by_schedule': lambda: optax.scale_by_schedule(lambda _: 0.5),
    'scale_by_zoom_linesearch': lambda: optax.scale_by_zoom_linesearch(5),
    'snapshot': lambda: optax.snapshot('norm', optax.tree.norm),
    'trace': lambda: optax.trace(0.9),
    'contrib.differentially_private_aggregate': (
        lambda: optax.contrib.differentially_private_aggregate(1.0, 0.1, 0)
    ),
    'contrib.reduce_on_plateau': (
        lambda: optax.contrib.reduce_on_plateau(0.5, patience=1, rtol=1.0)
    ),
    'contrib.scale_by_galore': lambda: optax.contrib.scale_by_galore(2),
    'contrib.scale_by_madgrad': lambda: optax.contrib.scale_by_madgrad(0.01),
    'contrib.scale_by_muon': lambda: optax.contrib.scale_by_muon(
        weight_dimension_numbers=dict.fromkeys(
            INITIAL, optax.contrib.MuonDimensionNumbers()
        )
    ),
}


def _sam(tx, **kwargs):
  sam = optax.contrib.sam(
      tx, optax.chain(optax.contrib.normalize(), optax.sgd(0.05)), **kwargs
  )
  # It refuses extra arguments other than this one.
  update = lambda updates, state, params=None, *, grad_fn=None, **_: sam.update(
      updates, state, params, grad_fn=grad_fn
  )
  return optax.GradientTransformationExtraArgs(sam.init, update)


_every_third = lambda step: step % 3 != 1
_first = lambda wrapped, rest: {'a': wrapped, 'b': rest}
_parts = lambda tx: _first(tx, optax.sgd(0.01))
_scaled = lambda tx: lambda rate: optax.chain(optax.scale(rate), tx)
WRAPPERS = {
    'apply_if_finite': lambda tx: optax.apply_if_finite(tx, 3),
    'chain': lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx),
    'conditionally_mask': (
        lambda tx: optax.conditionally_mask(tx, _every_third)
    ),
    'conditionally_transform': (
        lambda tx: optax.conditionally_transform(tx, _every_third)
    ),
    'flatten': optax.flatten,
    'inject_hyperparams': (
        lambda tx: optax.inject_hyperparams(_scaled(tx))(1.0)
    ),
    'inject_stateful_hyperparams': (
        lambda tx: optax.inject_stateful_hyperparams(_scaled(tx))(1.0)
    ),
    'lookahead': lambda tx: optax.lookahead(tx, 2, 0.5),
    'lookahead, reset_state': (
        lambda tx: optax.lookahead(tx, 2, 0.5, reset_state=True)
    ),
    'masked': lambda tx: optax.chain(
        optax.masked(tx, _first(True, False)),
        optax.masked(optax.sgd(0.01), _first(False, True)),
    ),
    'multi_transform': (
        lambda tx: optax.multi_transform(_parts(tx), _first('a', 'b'))
    ),
    'MultiSteps': lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
    'MultiSteps, skip_not_finite': lambda tx: optax.MultiSteps(
        tx, 2, should_skip_update_fn=optax.skip_not_finite
    ).gradient_transformation(),
    'named_chain': lambda tx: optax.named_chain(
        ('clip', optax.clip_by_global_norm(1.0)), ('optimizer', tx)
    ),
    'partition': lambda tx: optax.partition(_parts(tx), _first('a', 'b')),
    'selective_transform': lambda tx: optax.selective_transform(
        tx, freeze_mask=_first(False, True)
    ),
    'with_extra_args_support': optax.with_extra_args_support,
    'contrib.mechanize': optax.contrib.mechanize,
    'contrib.sam': _sam,
    'contrib.sam, opaque_mode': lambda tx: _sam(tx, opaque_mode=True),
    'contrib.schedule_free': lambda tx: optax.contrib.schedule_free(tx, 0.01),
    'contrib.split_real_and_imaginary': optax.contrib.split_real_and_imaginary,
}
# These apply a function of the caller.
OF_A_FUNCTION = ('measure_with_ema', 'stateless', 'stateless_with_tree_map')
# These take the gradients of single examples.
PER_EXAMPLE = ('contrib.differentially_private_aggregate', 'contrib.dpsgd')

STEPS = 12
KEPT = {'a': 32, 'b': 16}
ALGORITHMS = {
    'static': lambda: spdf.static(0.75),
    'RigL': lambda: spdf.rigl(0.75, update_every=3, update_until=9),
}


def train(tx, *, per_example=False, paired=False, masked=False):
  """Yields parameters, state and loss after each step."""
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
    params = optax.apply_updates(params, updates)
    if masked:
      mask = spdf.get_mask(state)
      params = optax.LookaheadParams(
          *(spdf.apply_mask(tree, mask) for tree in params)
      )
    return params, state, value

  pair = optax.LookaheadParams.init_synced if paired else lambda params: params
  state = tx.init(pair(INITIAL))
  params = pair(spdf.apply_mask(INITIAL, spdf.get_mask(state)))
  for _ in range(STEPS):
    params, state, value = step(params, state)
    yield params, state, float(value)


def outcome(make_tx, **kwargs):
  """Trains; returns 'kept', 'lost', 'diverges', or 'error' if it cannot."""
  values = []
  try:
    for params, state, value in train(make_tx(), **kwargs):
      if not exact(*jax.device_get((params, spdf.get_mask(state)))):
        return 'lost'
      values.append(value)
  except (AttributeError, TypeError, ValueError):
    return 'error'
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
  # A part that sets the size of updates may diverge with exact zeros, too.
  return tuple('kept' if each == 'diverges' else each for each in outcomes)


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


def test_the_guide_lists_every_transformation():
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


LOSING = {
    'scale': lambda tx: optax.chain(tx, optax.scale(0.5)),
    'ema': lambda tx: optax.chain(tx, optax.ema(0.9)),
    **{name: WRAPPERS[name] for name in (
        'conditionally_transform', 'lookahead', 'contrib.mechanize',
    )},
}


def sparse():
  return spdf.sparsify(optax.adam(0.01), ALGORITHMS['RigL'](), key=0)


def lost_in(params, state):
  """Returns the leaves that have pruned weights other than zero."""
  params, mask = jax.device_get((params, spdf.get_mask(state)))
  return [name for name in INITIAL if params[name][mask[name] == 0].any()]


@pytest.mark.parametrize('name', LOSING)
def test_check_names_the_leaves_whose_zeros_are_lost_outside(name):
  any_lost = False
  paired = name == 'lookahead'
  for params, state, _ in train(LOSING[name](sparse()), paired=paired):
    params = params.fast if paired else params
    lost = lost_in(params, state)
    if not lost:
      spdf.check_zeros(params, state)
      continue
    any_lost = True
    with pytest.raises(ValueError, match=f"'{lost[0]}'"):
      spdf.check_zeros(params, state)
  assert any_lost


def test_masking_after_every_step_restores_the_zeros():
  tx = WRAPPERS['lookahead'](sparse())
  for params, state, _ in train(tx, paired=True, masked=True):
    assert not lost_in(params.fast, state)


def test_sam_around_sparsify_loses_the_zeros_in_its_adversarial_step():
  # It also computes with the state, which turns the mask into integers.
  params, state, _ = next(train(WRAPPERS['contrib.sam'](sparse())))
  assert lost_in(params, state) == ['a', 'b']
  with pytest.raises(ValueError, match='put that transformation inside'):
    spdf.check_zeros(params, state)


@pytest.mark.slow
def test_the_guide_shows_what_was_measured():
  shown = _BLOCK.search(GUIDE.read_text())[0].split('\n', 1)[1]
  assert shown == render(), 'run python tests/sparsity/optimizer_matrix_test.py'


if __name__ == '__main__':
  GUIDE.write_text(
      _BLOCK.sub(lambda block: block[1] + render(), GUIDE.read_text())
  )
