"""A config's JSON gives the same algorithm as Python."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spdf_jax as spdf
from spdf_jax.sparsity.algorithms import ALGORITHMS
from spdf_jax.sparsity.algorithms import create_algorithm
from spdf_jax.sparsity.algorithms import member_specs
from spdf_jax.sparsity.algorithms import resolve
from spdf_jax.sparsity.algorithms import user_functions
from spdf_jax.sparsity.distributions import ModelWide
from tests.refusals import refuse
from tests.tiny_run import static

PARAMS = {
    'a': jax.random.normal(jax.random.key(0), (1, 8, 16)),
    'b': jax.random.normal(jax.random.key(1), (1, 8, 32)),
}
UPDATES = {'update_every': 10, 'update_until': 70}


def own(sparsity, *, flavour='plain'):
  """An algorithm as in a module of a user."""
  if flavour == 'broken':
    return sparsity
  return spdf.static(sparsity)


def forwarding(**arguments):
  """An algorithm whose arguments are those of another function."""
  return spdf.rigl(**arguments)


def make(name, **arguments):
  """Creates an algorithm after a round trip through JSON."""
  return create_algorithm(
      json.loads(json.dumps({'name': name, **arguments}))
  )


def sparsities(algorithm, *steps):
  return [algorithm.sparsity_at(step, PARAMS)['a'] for step in steps]


@pytest.mark.parametrize('name', ['gmp', 'granet', 'rigl', 'set'])
def test_algorithms_with_mask_updates_are_created_by_name(name):
  algorithm = make(name, sparsity=0.5, **UPDATES)
  assert [algorithm.update_at(step) for step in (10, 11, 70, 80)] == [
      True, False, True, False
  ]
  rises = name in ('gmp', 'granet')
  want = [spdf.cubic(0.0, 0.5, 70)(step) if rises else 0.5 for step in (0, 30)]
  assert sparsities(algorithm, 0, 30, 70) == [*want, 0.5]


def test_specs_accept_our_schedules_and_those_of_optax():
  cubic = dict(schedule='cubic', initial=0.5, final=0.8, steps=70)
  want = spdf.cubic(0.5, 0.8, 70)
  assert sparsities(make('gmp', sparsity=cubic, **UPDATES), 0, 30, 70) == [
      want(0), want(30), 0.8
  ]
  linear = dict(
      schedule='linear_schedule', init_value=0.2, end_value=0.6,
      transition_steps=40,
  )
  actual = sparsities(make('rigl', sparsity=linear, **UPDATES), 0, 20, 60)
  np.testing.assert_allclose(actual, [0.2, 0.4, 0.6], rtol=1e-6)
  turns = dict(schedule='periodic', sparsities=[0.0, 0.5], period=20)
  actual = sparsities(make('gmp', sparsity=turns, **UPDATES), 10, 20, 40)
  assert actual == [0.0, 0.5, 0.0]


def test_a_drop_fraction_is_a_number_or_a_schedule():
  def grown(drop_fraction):
    algorithm = make(
        'rigl', sparsity=0.5, drop_fraction=drop_fraction,
        regrow_dropped=False, **UPDATES,
    )
    mask = algorithm.init(jax.random.key(0), PARAMS)
    after = algorithm.update(
        jax.random.key(1), jnp.int32(10), mask, PARAMS, PARAMS
    )
    return int((after['a'] & ~mask['a']).sum())

  constant = dict(schedule='constant_schedule', value=0.25)
  assert grown(constant) == 16
  assert grown(dict(schedule='cosine', initial=0.25, steps=20)) == 8
  assert 8 < grown(0.25) < 16  # Falls to zero at the last update.


def test_distributions_are_named_with_or_without_arguments():
  erk = make('static', sparsity=0.5, distribution='erk')
  assert erk.sparsity_at(0, PARAMS) == spdf.erk(PARAMS, 0.5)
  flat = make(
      'static', sparsity=0.5, distribution=dict(distribution='erk', power=0.0)
  )
  np.testing.assert_allclose(sparsities(flat, 0), 0.5)
  whole = make('static', sparsity=0.5, distribution='model_wide')
  assert whole.sparsity_at(0, PARAMS) == ModelWide(0.5)


@pytest.mark.parametrize('sparsity', [
    [['a', 0.5], ['*', 0.25]], {'a': 0.5, '*': 0.25},
])
def test_sparsities_by_pattern_are_pairs_or_a_mapping(sparsity):
  algorithm = make('static', sparsity=sparsity, distribution='by_pattern')
  assert algorithm.sparsity_at(0, PARAMS) == {'a': 0.5, 'b': 0.25}


def test_a_sparsity_by_pattern_may_be_a_schedule():
  rise = dict(schedule='cubic', initial=0.0, final=0.5, steps=70)
  algorithm = make(
      'gmp', sparsity=[['b', rise], ['*', 0.25]], distribution='by_pattern',
      **UPDATES,
  )
  assert algorithm.sparsity_at(0, PARAMS) == {'a': 0.0, 'b': 0.0}
  assert algorithm.sparsity_at(70, PARAMS) == {'a': 0.25, 'b': 0.5}


@pytest.mark.parametrize('name', ['gmp', 'granet', 'rigl'])
def test_the_first_of_patterns_decides_though_its_name_sorts_last(name):
  algorithm = make(
      name, sparsity={'b': 0.5, '*': 0.25}, distribution='by_pattern', **UPDATES
  )
  assert algorithm.sparsity_at(70, PARAMS) == {'a': 0.25, 'b': 0.5}


def test_structures_are_named_with_or_without_arguments():
  plain = make('static', sparsity=0.5, structure='unstructured')
  two_of_four = make(
      'static', sparsity=0.5, structure=dict(structure='n_of_m', n=2, m=4)
  )
  masks = [
      np.asarray(x.init(jax.random.key(0), PARAMS)['a'])
      for x in (plain, two_of_four)
  ]
  kept = [mask.reshape(2, 4, 16).sum(axis=1) for mask in masks]
  assert not (kept[0] == 2).all() and (kept[1] == 2).all()


def test_initial_masks_are_created_by_name():
  mask = make('static', sparsity=0.5, init='magnitude').init(None, PARAMS)
  want = spdf.init.magnitude(None, PARAMS, 0.5)
  np.testing.assert_array_equal(mask['b'], want['b'])
  zeroed = spdf.apply_mask(PARAMS, want)
  kept = make('static', sparsity=0.5, init='nonzero').init(None, zeroed)
  np.testing.assert_array_equal(kept['b'], want['b'])
  drawn = make('static', sparsity=0.5, init='random')
  assert (drawn.init(jax.random.key(0), PARAMS)['b'] != want['b']).any()


def test_rounds_are_a_list_of_mappings():
  rounds = [dict(steps=20), dict(steps=30, fraction=0.25, rewind_to=5)]
  algorithm = make('iterative', rounds=rounds)
  assert sparsities(algorithm, 0, 19, 20, 100) == [0.0, 0.0, 0.25, 0.25]
  built = create_algorithm({
      'name': 'iterative',
      'rounds': [spdf.Round(20), spdf.Round(30, 0.25)],
  })
  assert sparsities(built, 19, 20) == [0.0, 0.25]


RIGL = {'name': 'rigl', 'sparsity': 0.75, **UPDATES}


def test_groups_are_a_partition_of_algorithms_bit_for_bit():
  grouped = make('partition', groups=[['a', RIGL], ['*', static(0.5)]])
  want = spdf.partition(
      {'one': spdf.rigl(0.75, **UPDATES), 'other': spdf.static(0.5)},
      [('a', 'one'), ('b', 'other')],
  )
  assert grouped.sparsity_at(9, PARAMS) == {'a': 0.75, 'b': 0.5}
  masks = []
  for algorithm in (grouped, want):
    mask = algorithm.init(jax.random.key(0), PARAMS)
    args = jax.random.key(1), jnp.int32(10), mask, PARAMS, PARAMS
    masks.append((mask, algorithm.update(*args)))
  jax.tree.map(np.testing.assert_array_equal, *masks)
  for step in (9, 10, 70, 80):
    assert grouped.update_at(step) == want.update_at(step) == (step in (10, 70))
    assert grouped.dense_grads_at(step) == want.dense_grads_at(step)


def test_member_specs_returns_the_specs_of_all_groups():
  assert member_specs(RIGL) == [RIGL]
  own = {'name': f'{__name__}:own', 'sparsity': 0.75}
  groups = [['a', own], ['*', RIGL]]
  spec = {'name': 'partition', 'groups': groups}
  assert member_specs(spec) == [own, RIGL]
  assert member_specs({'name': 'dense', 'groups': groups}) != [own, RIGL]


TIMES = {'update_every': '5%', 'update_until': '75%', 'init': None}


@pytest.mark.parametrize('steps, every, until', [
    (1000, 50, 750), (1, 1, 1), (203, 10, 152), (39, 1, 29), (10**9, 5 * 10**7,
                                                             75 * 10**7),
])
def test_shares_of_a_phase_are_rounded_down_to_at_least_one_step(
    steps, every, until
):
  resolved = resolve({'name': 'rigl', 'sparsity': 0.5} | TIMES, steps)
  assert resolved == {'name': 'rigl', 'sparsity': 0.5, 'update_every': every,
                      'update_until': until}
  assert resolve(resolved, 7) == resolved


def test_times_are_shares_or_steps_wherever_an_algorithm_has_them():
  rise = {'schedule': 'cubic', 'initial': 0.0, 'final': 0.5, 'steps': '50%',
          'start': '0%'}
  resolved = resolve({
      'name': 'partition', 'sparsity': 0.1, 'groups': [
          ['a', {'name': 'gmp', 'sparsity': rise, 'update_from': '12 steps',
                 'update_every': ['7', '12.5%'], 'update_until': 9}],
          ['*', {'name': 'iterative', 'rounds': [{'steps': '25%'}]}],
      ],
  }, 40)
  assert resolved == {'name': 'partition', 'groups': [
      ['a', {'name': 'gmp', 'sparsity': rise | {'steps': 20, 'start': 0},
             'update_from': 12, 'update_every': [7, 5], 'update_until': 9}],
      ['*', {'name': 'iterative', 'rounds': [{'steps': 10}]}],
  ]}


@pytest.mark.parametrize('every, until', [
    ('5%', '75%'), ('5%', 600), (100, '75%'), ('0.001%', '7 steps'),
])
def test_update_times_are_not_checked_before_the_length_is_known(every, until):
  rigl = RIGL | {'update_every': every, 'update_until': until}
  for spec in (rigl, {'name': 'partition', 'groups': [['*', rigl]]}):
    create_algorithm(resolve(spec, None))


def test_arguments_of_other_algorithms_are_left_out():
  spec = {'name': 'static', 'sparsity': 0.5, 'drop_fraction': 0.3} | TIMES
  assert resolve(spec, 100) == static(0.5)
  assert resolve(spec | {'name': 'dense'}, 100) == {'name': 'dense'}
  name = f'{__name__}:own'
  assert resolve(spec | {'name': name}, 100) == {'name': name, 'sparsity': 0.5}
  name = f'{__name__}:forwarding'
  assert resolve({'name': name, 'x': 1} | TIMES, 100) == {
      'name': name, 'x': 1, 'update_every': 5, 'update_until': 75
  }


@pytest.mark.parametrize('change, message', [
    ({'update_evry': 3}, "argument 'update_evry' is unknown; did y.*_every'"),
    ({'algorithm': 'rigl'}, "'rigl': argument 'algorithm' is unknown"),
    ({'update_until': 'half'}, "update_until is 'half'; give a number of"),
    ({'update_until': '5 tokens'}, "or a percentage of the phase, e.g. '75%'"),
    ({'update_until': '-5%'}, "update_until is '-5%'; give"),
    ({'name': 'static', 'update_every': 'often'}, "update_every is 'often'"),
    ({'name': 3}, "algorithm is {'name': 3.*; give its name and arguments"),
])
def test_an_argument_or_time_that_none_takes_is_refused(change, message):
  spec = {'name': 'rigl', 'sparsity': 0.5} | TIMES | change
  refuse(message, resolve, spec, 100)


def test_an_algorithm_of_ones_own_is_named_by_module_and_function():
  algorithm = make(f'{__name__}:own', sparsity=0.75, flavour='sweet')
  assert sparsities(algorithm, 0) == [0.75]


def rising(*, final):
  return lambda step: final * step / 70


def halves(params, sparsity):
  return jax.tree.map(lambda p: sparsity / 2, params)


def rows():
  return spdf.structures.channel('inputs')


def first(key, params, sparsities, *, structure=None):
  return jax.tree.map(
      lambda p, s: jnp.arange(p.size).reshape(p.shape) < p.size * (1 - s),
      params, sparsities,
  )


def at_squares(step):
  return jnp.isin(step, jnp.arange(3, 9) ** 2)


def paths(units):
  mask = units.mask.astype('float32')
  return mask @ mask.swapaxes(-1, -2) @ mask


def test_parts_of_an_algorithm_are_named_by_module_and_function():
  here = lambda name: f'{__name__}:{name}'
  pruned = make('static', sparsity=0.5, distribution=here('halves'))
  assert sparsities(pruned, 0) == [0.25]
  in_rows = make('static', sparsity=0.5, structure=here('rows'))
  mask = in_rows.init(jax.random.key(0), PARAMS)['a']
  assert (mask.all(-1) | ~mask.any(-1)).all() and mask.mean() == 0.5
  kept = make('static', sparsity=0.75, init=here('first'))
  mask = kept.init(jax.random.key(0), PARAMS)['a']
  assert mask.reshape(-1)[:32].all() and mask.sum() == 32
  rises = make('gmp', sparsity={'schedule': here('rising'), 'final': 0.7},
               **UPDATES)
  assert sparsities(rises, 30)[0] == pytest.approx(0.3)
  spec = {'name': 'rigl', 'sparsity': 0.5, 'update_every': here('at_squares'),
          'update_until': '70%'}
  squares = create_algorithm(resolve(spec, 100))
  assert [squares.update_at(step) for step in (10, 16, 64, 81)] == [
      False, True, True, False
  ]
  assert user_functions({'structure': '2:4', 'groups': [['*', spec]]}) == [
      here('at_squares')
  ]


@pytest.mark.parametrize('name, needs', [('set', False), ('rigl', True)])
def test_growth_by_own_scores_is_that_of_numpy(name, needs):
  algorithm = make(name, sparsity=0.75, grow=f'{__name__}:paths', **UPDATES)
  assert algorithm.dense_grads_at(10) is needs
  mask = algorithm.init(jax.random.key(0), PARAMS)
  grads = jax.tree.map(jnp.ones_like, PARAMS)
  updated = algorithm.update(jax.random.key(1), 10, mask, PARAMS, grads)
  old, new = (np.asarray(m['a'][0]) for m in (mask, updated))
  magnitude = np.abs(np.asarray(PARAMS['a'][0])) * old
  fraction = 0.3 if name == 'set' else float(
      0.15 * (1 + np.cos(np.pi * 10 / 70))
  )
  survivors = magnitude >= np.sort(magnitude, axis=None)[
      -(old.sum() - int(fraction * old.sum()))
  ]
  scores = old.astype(int) @ old.T.astype(int) @ old.astype(int)
  order = np.argsort(-scores + 1e9 * survivors, axis=None, kind='stable')
  want = survivors.copy()
  want.flat[order[:old.sum() - survivors.sum()]] = True
  np.testing.assert_array_equal(new, want)


def test_objects_in_place_of_specs_are_used_as_they_are():
  algorithm = create_algorithm({
      'name': 'gmp', 'sparsity': spdf.cubic(0.0, 0.5, 70),
      'distribution': spdf.erk, 'init': spdf.init.random,
      'structure': spdf.structures.block(2, 2), **UPDATES,
  })
  assert sparsities(algorithm, 0) == [0.0]


@pytest.mark.parametrize('spec, message', [
    ({}, "algorithm is {}; give its name and arguments, e.g. {'name': 'stat"),
    (0.75, 'algorithm is 0.75; give its name and arguments'),
    ({'name': 'iterative', 'rounds': [5]}, r'rounds is \[5\]; give a li'),
    ({'name': 'rigl', 'sparsity': 0.5},
     "algorithm 'rigl': missing a required argument: 'update_every'; its arg"),
    ({'name': 'static', 'sparsity': 0.5, 'level': 1},
     "'static': got an unexpected keyword argument 'level'; its arguments are"
     ' sparsity, distribution'),
    ({'name': 'static', 'sparsity': {'schedule': 'cubik'}},
     "schedule 'cubik' is unknown; did you mean 'cubic'"),
    ({'name': 'static', 'sparsity': [0.5, 0.5]},
     r'is \[0.5, 0.5\]; give a number, .* of \[pattern, sparsity\] pairs'),
    ({'name': 'static', 'sparsity': 0.5, 'distribution': 'erq'},
     "distribution 'erq' is unknown; did you mean 'erk'"),
    ({'name': 'static', 'sparsity': 0.5, 'structure': 'n_of_n'},
     "structure 'n_of_n' is unknown; did you mean 'n_of_m'"),
    ({'name': 'static', 'sparsity': 0.5, 'init': 'magnitudes'},
     "init 'magnitudes' is unknown; did you mean 'magnitude'"),
    ({'name': 'static', 'sparsity': 0.5,
      'distribution': f'{__name__}:paths'},
     r"distribution '.*:paths': too many positional arguments; its arguments"),
    (RIGL | {'grow': 'slope'}, "grow 'slope' is unknown"),
    ({'name': 'iterative', 'rounds': [{'step': 3}]},
     "a round: missing a required argument: 'steps'; its arguments are steps"),
    ({'name': 'no_such_module.at_all:f'},
     r"'no_such_module.at_all:f' cannot be imported \(No module named"),
    ({'name': ':f'}, "algorithm ':f' names no module; write"),
    ({'name': 'json:dunps'}, "name 'dunps' is unknown; did you mean 'dum"),
    ({'name': f'{__name__}:own', 'sparsity': 0.5, 'flavour': 'broken'},
     "own' returned 0.5; let the function return an spdf_jax.Algorithm"),
    ({'name': 'partition', 'groups': [['a', RIGL], 'b']}, 'groups is'),
    ({'name': 'partition', 'groups': [['a', 0.5]]}, 'groups is'),
    ({'name': 'partition', 'groups': [['a', RIGL], ['a', RIGL]]},
     "groups has the pattern 'a' 2 times; give each pattern once"),
    ({'name': 'partition', 'groups': [['a', {'name': 'rigle'}]]},
     "group 'a': algorithm 'rigle' is unknown; did you mean 'rigl'"),
    ({'name': 'partition', 'groups': [
        ['a', {'name': 'partition', 'groups': [['*', RIGL]]}],
    ]}, "group 'a' is a partition, .*; give its groups in the outer list"),
])
def test_invalid_input_is_refused_in_a_sentence(spec, message):
  refuse(message, create_algorithm, json.loads(json.dumps(spec)))


def test_an_error_inside_a_users_module_is_not_replaced(tmp_path, monkeypatch):
  (tmp_path / 'needs_another.py').write_text('import no_such_library\n')
  monkeypatch.syspath_prepend(tmp_path)
  with pytest.raises(ModuleNotFoundError, match='no_such_library'):
    create_algorithm({'name': 'needs_another:f'})


def test_every_algorithm_has_a_public_name():
  names = {'sparse_evolution' if n == 'set' else n for n in ALGORITHMS}
  assert {name for name in names if not hasattr(spdf, name)} == set()
