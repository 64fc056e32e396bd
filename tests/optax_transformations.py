"""Every transformation of optax, by name, and a small model to train.

An optimizer takes no arguments, a part of one is put before or after others in
a chain, and a wrapper is a function of the transformation that it wraps.
"""

import functools

import jax.numpy as jnp
import numpy as np
import optax

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


def get(name):
  return functools.reduce(getattr, name.split('.'), optax)


OPTIMIZERS = {
    **{n: functools.partial(get(n), 0.01) for n in _BY_RATE.split()},
    **{n: get(n) for n in _BY_DEFAULT.split()},
    'contrib.dpsgd': lambda: optax.contrib.dpsgd(0.01, 1.0, 0.1, 0),
    'contrib.galore': lambda: optax.contrib.galore(0.01, rank=2),
}
# Parts of optimizers: they come before, or after, others in a chain.
PARTS = {
    **{n: get(n) for n in (
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
# They do what a function of the caller does.
OF_A_FUNCTION = ('measure_with_ema', 'stateless', 'stateless_with_tree_map')
# They take the gradients of single examples.
PER_EXAMPLE = ('contrib.differentially_private_aggregate', 'contrib.dpsgd')
