"""Calls that are refused, by exception and module, with words of the error."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spdf_jax as spdf
from spdf_jax import structures
from spdf_jax.sparsity import one_shot
from spdf_jax.sparsity import schedules
from spdf_jax.sparsity.trees import map_leaves
from tests import sparse_parabola as parabola

TIMES = parabola.TIMES
MANY = 2**31 + 5
SGD, ADAM = optax.sgd(0.1), optax.scale_by_adam()
STATIC = [spdf.static(0.5), spdf.dense()]
PARAMS = {'w': jnp.ones((4, 8)), 'b': jnp.ones(8)}
MASK = {'w': np.eye(4, 8) > 0, 'b': None}
LAYERS = {
    'attn': {'k': jnp.ones((1, 8, 8))},
    'mlp': {'wi': jnp.ones((1, 8, 32))},
}
NO_WEIGHTS = {'w': jnp.ones((1, 4, 4)), 'none': jnp.ones((1, 0, 4))}


def sparse(inner=SGD, algorithm=STATIC[0], key=0, **options):
  return spdf.sparsify(inner, algorithm, key=key, **options)


def init(algorithm):
  return sparse(algorithm=algorithm).init(parabola.make_params())


def update(tx, *params):
  return tx.update(PARAMS, tx.init(PARAMS), *params)


def draw(sparsity, params=PARAMS):
  return spdf.init.random(jax.random.key(0), params, sparsity)


REFUSED = {TypeError: [
    # Masks.
    (lambda: spdf.apply_mask(MASK, PARAMS), "leaf '.' of float32, not bool"),
    (lambda: spdf.summarize(PARAMS, MASK), "leaf '.' of float32, not bool"),
    # Rewinding and resets.
    (lambda: spdf.reset_state(3, [1]), 'is 3; give an optimizer'),
    (lambda: spdf.rewind_weights(3, [1], snapshot_at=0), 'is 3; give'),
    # Selection.
    (lambda: sparse(where='mlp'), "where is 'mlp'; give a function"),
    (lambda: sparse(where={'*/mlp': 1}), r"where is 1 at '\*/mlp'; give"),
    (lambda: sparse(where=spdf.where.stacked).init(PARAMS),
     r'where\.stacked\(\)'),
    (lambda: sparse().init({'w': PARAMS['w'], 'x': 1.0}),
     "at 'x', which is not an array"),
    (lambda: sparse().init({'w': PARAMS['w'], 'x': jax.nn.relu}),
     "at 'x', which is not an array"),
    # Sparsify.
    (lambda: sparse(3), 'is 3; give an optimizer'),
    (lambda: sparse(optax.adam), 'inner is <function adam .*optax.adamw'),
    (lambda: sparse(optax.MultiSteps(SGD, 2)),
     r'inner is an optax.MultiSteps; .* every_k_schedule=k\).gradient_transf'),
    (lambda: sparse(algorithm=0.75), 'algorithm is 0.75; give an algorithm'),
    (lambda: sparse(key=0.5), r'key is 0.5; .* jax.random.key\(0\)'),
    (lambda: sparse(key=jax.random.PRNGKey(0)), 'key is Array.*typed key'),
    (lambda: sparse(revive=0.5), r'revive is 0.5; .* scaled_normal\(0.5\)'),
], ValueError: [
    # Adapters.
    (lambda: spdf.lora(SGD, 0, key=0).init(PARAMS),
     r"rank is 0, and 'w' has 4 inputs and 8 outputs; give 1 to 4\."),
    (lambda: spdf.lora(SGD, 5, key=0).init(PARAMS),
     r"rank is 5, and 'w' has 4 inputs and 8 outputs; give 1 to 4\."),
    (lambda: update(spdf.lora(SGD, 2, key=0)),
     'lora needs params: call tx.update'),
    # Ages.
    (lambda: update(spdf.with_age(ADAM), PARAMS),
     'with_age got no mask; put it inside'),
    (lambda: update(sparse(
        spdf.with_age(ADAM, where={'b': lambda *_: True})
    ), PARAMS), 'give both the same where'),
    (lambda: spdf.with_age(ADAM, warmup=-1),
     'warmup is -1; give a number of steps'),
    # Algorithms.
    (lambda: spdf.static(1.0), r'sparsity is 1.0; .*\[0, 1\)'),
    (lambda: spdf.static(spdf.cubic(0.0, 0.5, 10)), 'sparsity is a schedule'),
    (lambda: spdf.static(0.5, structure=4), 'structure is 4; give'),
    (lambda: spdf.static(0.5, structure='4:2'), 'n is 4 and m is 2'),
    (lambda: spdf.gmp(0.5, init=0.5, **TIMES), 'init is 0.5; give'),
    (lambda: spdf.gmp(0.5, update_every=1, update_until=MANY),
     'from 1 to 2,147,483,647'),
    (lambda: spdf.rigl(0.5, distribution=1, **TIMES), 'distribution is 1'),
    (lambda: spdf.rigl(0.8, update_every=0, update_until=9),
     'update_every is 0'),
    (lambda: spdf.rigl(0.8, update_every=1, update_until=None),
     'update_until is None'),
    (lambda: spdf.rigl(0.8, drop_fraction=1.5, **TIMES), 'fraction is 1.5'),
    (lambda: spdf.rigl(0.8, drop_fraction=lambda step: 1.5, **TIMES),
     r'drop_fraction is 1.5; give a number in \[0, 1\]'),
    (lambda: spdf.rigl(lambda step: step / 10, **TIMES),
     'sparsity at step 12 is 1.2'),
    (lambda: spdf.granet(0.8, drop_fraction=0, **TIMES),
     r'drop_fraction is 0; give a number in \(0, 1\)'),
    (lambda: spdf.sparse_evolution(
        0.8, update_every=3, drop_fraction=schedules.cosine(0.3, 9)
    ), 'update_until is None'),
    (lambda: spdf.sparse_evolution(spdf.cubic(0, 0.5, 9), update_every=3),
     'update_until is None.* give update_until'),
    (lambda: spdf.sparse_evolution(0.8, update_every=3, drop='sign'),
     "drop is 'sign'; give 'magnitude' or 'signed'"),
    (lambda: spdf.sparse_evolution(
        0.5, update_every=3, drop='signed', structure='2:4'
    ), r'works without a structure only, but structure is n_of_m\(2, 4\)'),
    (lambda: spdf.sparse_evolution(0.5, update_every=3, drop_fraction='a'),
     "drop_fraction is 'a'; give a number, or a schedule"),
    (lambda: spdf.iterative([spdf.Round(9)], distribution='erk'),
     "distribution is 'erk', but iterative prunes by 'uniform' or 'model_w"),
    (lambda: spdf.iterative([spdf.Round(2), spdf.Round(2, 0.5, MANY)]),
     'from 0 to 2,147,483,647'),
    # Algorithms that do not fit the parameters.
    (lambda: init(spdf.rigl(0.9, drop_fraction=1e-3, **TIMES)),
     'drops no weight .* of a layer that keeps 10'),
    (lambda: init(spdf.rigl(0.75, structure='2:4', **TIMES)),
     'sparsity is 0.75'),
    (lambda: init(spdf.gmp(0.5, structure=structures.block(5, 8), **TIMES)),
     'block.* 5'),
    (lambda: init(spdf.rigl(0.9999, distribution=spdf.erk, **TIMES)),
     'erk needs one'),
    (lambda: init(spdf.rigl(
        {'no/*': 0.5}, distribution=spdf.by_pattern, **TIMES
    )), r"'no/\*'"),
    (lambda: init(spdf.gmp(
        spdf.periodic([0.9, 0.5], 6), update_every=6, update_until=6,
        distribution='model_wide',
    )), "sparsity falls, but distribution 'model_wide'"),
    (lambda: init(spdf.iterative(
        [spdf.Round(9)], distribution='model_wide', structure='2:4'
    )), 'ranks the weights of all layers together, but the structure'),
    (lambda: init(spdf.iterative(
        [spdf.Round(9), spdf.Round(9, 0.9999)], distribution='model_wide'
    )), 'fewer than the 2 of one weight'),
    (lambda: init(spdf.iterative(
        [spdf.Round(9), spdf.Round(9, 0.25)], structure='2:4'
    )), 'which keeps exactly 2 of 4'),
    # Combinators.
    (lambda: spdf.join(STATIC, [MANY]), 'from 0 to 2,147,483,647'),
    (lambda: spdf.join([*STATIC, spdf.dense()], [5, 5]), 'boundar'),
    (lambda: spdf.join(STATIC, [0]), 'boundar'),
    (lambda: spdf.join([*STATIC, spdf.dense()], [3]), 'boundar'),
    (lambda: spdf.join(STATIC, [3], enter='x'), "enter 'x' is"),
    (lambda: spdf.partition({}, []), 'algorithms is empty'),
    # Densities.
    (lambda: update(spdf.scale_by_density(1.0), PARAMS),
     'got no mask; put it inside sparsify'),
    (lambda: spdf.scale_init(
        PARAMS, {'w': np.zeros((4, 8), bool), 'b': None}, 1.0
    ), "keeps no weight of 'w'.*lower its"),
    # Distributions.
    (lambda: spdf.uniform(LAYERS, 1.0), r'sparsity is 1.0; .* \[0, 1\)'),
    (lambda: spdf.erk(LAYERS, math.nan), r'sparsity is nan; .* \[0, 1\)'),
    (lambda: spdf.model_wide(LAYERS, 'half'), r"is 'half'; .* \[0, 1\)"),
    (lambda: spdf.erk(LAYERS, 0.5, power=math.nan), 'power is nan'),
    (lambda: spdf.erk({'w': jnp.ones((4, 2, 4))}, 0.9),
     'leaves 3.2 weights for 4 layers'),
    (lambda: spdf.erk(NO_WEIGHTS, 0.5),
     r"'none' has the shape \(1, 0, 4\), no weights; put None there"),
    (lambda: draw(spdf.model_wide(NO_WEIGHTS, 0.5), NO_WEIGHTS),
     r"'none' has the shape \(1, 0, 4\), no weights; put None there"),
    (lambda: spdf.by_pattern(LAYERS, 0.5), 'by_pattern needs patterns'),
    (lambda: spdf.uniform(LAYERS, {'attn/*': 0.5}), 'distribution=by_pattern'),
    (lambda: spdf.by_pattern(LAYERS, {'attn/*': 0.5, 'MLP/*': 0.25}),
     "'MLP/.*matches none.*attn/k.*mlp/wi"),
    (lambda: spdf.by_pattern(LAYERS, {'*': 0.5, 'mlp/*': 0.25}),
     r"'mlp/\*', but patterns before"),
    (lambda: spdf.by_pattern(LAYERS, [('*', 0.5), ('*', 0.9)]),
     r"pattern '\*' twice; give it once"),
    # Masks.
    (lambda: draw(1.0), r'sparsity is 1.0; .* \[0, 1\)'),
    (lambda: draw(math.nan), r'sparsity is nan; .* \[0, 1\)'),
    (lambda: draw('half'), r"sparsity is 'half'; .* \[0, 1\)"),
    (lambda: draw({'v': 0.5}), 'does not fit the parameters'),
    (lambda: spdf.apply_mask({'v': PARAMS['w']}, MASK),
     "has a leaf 'w', .* same parameters"),
    (lambda: spdf.map_masked(lambda m: m, MASK), 'a mask and no other tree'),
    # One-shot pruning.
    (lambda: one_shot.sparsegpt(damping=0),
     'damping is 0; it must be positive'),
    # Rewinding and resets.
    (lambda: spdf.iterative([]), 'rounds is empty'),
    (lambda: spdf.iterative([5]), r'rounds is \[5\]; give a list'),
    (lambda: spdf.iterative([spdf.Round(0)]), 'steps of round 0 is 0'),
    (lambda: spdf.iterative([spdf.Round(2), spdf.Round(2)]),
     r'fraction of round 1 is 0.0; .* \(0, 1\)'),
    (lambda: spdf.iterative([spdf.Round(2**30), spdf.Round(2**30, 0.2)]),
     'the number of steps of all rounds'),
    (lambda: spdf.rewind_schedule(
        float, [spdf.Round(2), spdf.Round(2, 0.2, -1)]
    ), 'rewind_to of round 1 is -1'),
    (lambda: spdf.rewind_weights(sparse(), [5, 9], snapshot_at=5),
     'snapshot_at is 5'),
    (lambda: update(spdf.rewind_weights(sparse(), [5, 9], snapshot_at=0)),
     'rewind_weights needs params'),
    (lambda: spdf.reset_state(ADAM, [MANY]), 'from 0 to 2,147,483,647'),
    (lambda: spdf.reset_state(ADAM, [2, 2]), 'boundaries are'),
    (lambda: spdf.reset_state(ADAM, [-1]), 'boundaries is'),
    (lambda: spdf.reset_state(ADAM, [1.5]), 'boundaries is'),
    # Schedules and times.
    (lambda: spdf.cubic(1.0, 0.5, 10), 'initial is 1.0'),
    (lambda: spdf.cubic(0.0, 0.5, 0), 'steps is 0'),
    (lambda: spdf.cubic(0.0, 0.5, 1, 2**31), 'start is 2147483648'),
    (lambda: spdf.periodic([], 10), 'sparsities is empty'),
    (lambda: spdf.periodic([0.5, 1.0], 10), 'a sparsity is 1.0'),
    (lambda: schedules.cosine(0.0, 10), 'initial is 0.0'),
    (lambda: schedules.sparsity_at(lambda t: t / 100, 100),
     r'at step 100 is 1\.0;'),
    (lambda: schedules.sparsity_at({'w': 1.5}, 100), r'sparsity is 1\.5;'),
    (lambda: schedules.sparsity_at(lambda t: None, 7),
     'returns None at step 7'),
    (lambda: schedules.update_times(0), 'every is 0'),
    (lambda: schedules.update_times(True), 'every is True'),
    (lambda: schedules.update_times(2**31), 'every is 2147483648'),
    (lambda: schedules.update_times(10, -1), 'update_from is -1'),
    (lambda: schedules.update_times(10, None, 9),
     'update_every=10 gives no mask update from step 10 to step 9'),
    (lambda: schedules.update_times([5, 1]), 'step 1 after step 5'),
    (lambda: schedules.update_times([-1, 5]), 'a step in update_every is -1'),
    (lambda: schedules.update_times(lambda t: True), 'update_until is None'),
    # Selection.
    (lambda: spdf.where.any_of(), 'any_of has no selectors'),
    # Sparsify.
    (lambda: sparse(where=lambda path, x: False).init(parabola.make_params()),
     r'selects no leaf.*h_0/kernel \(8'),
    (lambda: update(sparse()), 'needs params'),
    (lambda: spdf.get_mask(ADAM.init(PARAMS)), 'holds no SparsifyState'),
    (lambda: spdf.densify(ADAM.init(PARAMS)), 'holds no SparsifyState'),
    (lambda: spdf.get_dense_grads(ADAM.init(PARAMS)), 'holds no SparsifyState'),
    (lambda: spdf.scaled_normal(0), 'scale is 0; .* positive'),
    (lambda: spdf.scaled_normal(math.nan), 'scale is nan; .* positive'),
    (lambda: spdf.scaled_normal('a'), "scale is 'a'; .* positive"),
    (lambda: spdf.mask_statistics(sparse().init(PARAMS)),
     'does not track mask updates'),
    # Structures.
    (lambda: structures.n_of_m(0, 4), 'n is 0'),
    (lambda: structures.n_of_m(5, 4), 'n is 5 and m is 4'),
    (lambda: structures.n_of_m(2, True), 'm is True'),
    (lambda: structures.n_of_m(2, 4, 'rows'), "axis is 'rows'"),
    (lambda: structures.block(0, 4), 'inputs is 0'),
    (lambda: structures.balanced(0), 'groups is 0'),
    # Trees.
    (lambda: map_leaves(lambda x, y: x, {'a': 1.0}, {'b': 1.0}),
     'trees that differ'),
    (lambda: map_leaves(lambda x, y: x, {'a': 1.0}, None), 'trees that differ'),
]}


@pytest.mark.parametrize('error, call, message', [
    pytest.param(error, *row, id=row[-1])
    for error, rows in REFUSED.items() for row in rows
])
def test_invalid_arguments_are_refused(error, call, message):
  with pytest.raises(error, match=message):
    call()
