"""Tests of spdf_jax.sealed_json."""

import json

import pytest

from spdf_jax.sealed_json import seal
from spdf_jax.sealed_json import unseal

FIELDS = {
    'step': 3, 'rate': 0.1, 'name': 'é\ud800', 'none': None,
    'inner': {'b': [1, 2.0], 'a': True}, 'large': float('inf'),
}


def test_sealed_fields_survive_a_file():
  sealed = json.loads(json.dumps(seal(FIELDS), indent=2))
  assert unseal(sealed, 'a.json') == FIELDS
  assert seal(sealed) == sealed


def test_tuples_and_integer_keys_are_sealed_as_json_stores_them():
  sealed = seal({'shape': (2, 3), 'by_step': {10: 1, 9: 2}})
  found = unseal(json.loads(json.dumps(sealed)), 'a.json')
  assert found == {'shape': [2, 3], 'by_step': {'10': 1, '9': 2}}


def test_every_flipped_bit_is_found_or_changes_nothing():
  data = json.dumps(seal(FIELDS)).encode('ascii')
  key = data.index(b'"sha256"')
  for bit in range(8 * len(data)):
    damaged = bytearray(data)
    damaged[bit // 8] ^= 1 << bit % 8
    try:
      found = unseal(json.loads(damaged), 'a.json')
    except ValueError:
      continue
    # The same fields, or the name of the digest was changed.
    if found != FIELDS:
      assert key < bit // 8 < key + 7
      assert {k: found[k] for k in FIELDS} == FIELDS


def test_a_changed_field_is_refused_with_the_name_of_the_file():
  for changes in ({'step': 4}, {'other': 1}, {'sha256': None}):
    with pytest.raises(ValueError, match=r'^runs/a.json is damaged, .*again\.'):
      unseal({**seal(FIELDS), **changes}, 'runs/a.json')


def test_fields_without_a_digest_are_accepted():
  assert unseal(FIELDS, 'a.json') == FIELDS
