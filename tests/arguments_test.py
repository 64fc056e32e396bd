"""Arguments of wrong types are refused in one sentence, before training."""

import jax
import jax.numpy as jnp
import optax
import pytest

import spdf_jax as spdf

TIMES = dict(update_every=2, update_until=6)
PARAMS = {'w': jnp.ones((8, 8))}


def sparsify(inner=None, algorithm=None, **kwargs):
  return spdf.sparsify(
      optax.sgd(0.1) if inner is None else inner,
      spdf.static(0.5) if algorithm is None else algorithm,
      **{'key': 0} | kwargs,
  )


@pytest.mark.parametrize('call, message', [
    (lambda: sparsify(algorithm=0.75), 'algorithm is 0.75; give an algorithm'),
    (lambda: sparsify(optax.adam), 'inner is <function adam .*optax.adamw'),
    (lambda: sparsify(key=0.5), r'key is 0.5; .* jax.random.key\(0\)'),
    (lambda: sparsify(key=jax.random.PRNGKey(0)), 'key is Array.*typed key'),
    (lambda: sparsify(revive=0.5), r'revive is 0.5; .* scaled_normal\(0.5\)'),
])
def test_wrong_types_are_named(call, message):
  with pytest.raises(TypeError, match=message):
    call()


@pytest.mark.parametrize('call, message', [
    (lambda: spdf.static(spdf.cubic(0.0, 0.5, 10)), 'sparsity is a schedule'),
    (lambda: spdf.static(0.5, structure=4), 'structure is 4; give'),
    (lambda: spdf.rigl(0.5, distribution=1, **TIMES), 'distribution is 1'),
    (lambda: spdf.gmp(0.5, init=0.5, **TIMES), 'init is 0.5; give'),
    (lambda: spdf.static(0.5, structure='4:2'), 'n is 4 and m is 2'),
    (lambda: spdf.static(0.5, distribution='erc'), "did you mean 'erk'"),
    (lambda: spdf.static(0.5, init='magnitud'), "did you mean 'magnitude'"),
    (lambda: spdf.rigl(0.5, drop_fraction=2.0, **TIMES), 'drop_fraction is 2'),
    (lambda: spdf.granet(0.5, drop_fraction=-1, **TIMES), 'fraction is -1'),
])
def test_arguments_of_algorithms_that_cannot_be_are_named(call, message):
  with pytest.raises(ValueError, match=message):
    call()


def test_names_are_those_of_configs():
  structures = spdf.structures
  pairs = [
      (spdf.rigl(0.5, structure='2:4', **TIMES),
       spdf.rigl(0.5, structure=structures.n_of_m(2, 4), **TIMES)),
      (spdf.static(0.5, distribution='erk', init='magnitude'),
       spdf.static(0.5, distribution=spdf.erk, init=spdf.magnitude_mask)),
      (spdf.iterative([spdf.Round(5, 0.5)], structure='unstructured'),
       spdf.iterative([spdf.Round(5, 0.5)])),
  ]
  for named, given in pairs:
    masks = [
        spdf.get_mask(sparsify(algorithm=algorithm).init(PARAMS))['w'].tolist()
        for algorithm in (named, given)
    ]
    assert masks[0] == masks[1]
