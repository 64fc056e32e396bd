"""Tests of digests of arrays."""

import textwrap

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spdf_jax.training.checkpoints.identity import digest_arrays
from tests.child import run_python


def reference(x):
  """The digest in NumPy, with the index of C order."""
  x = np.ascontiguousarray(x)
  width = min(x.dtype.itemsize, 4)
  words = x.reshape(-1).view(f'uint{8 * width}').astype(np.uint64)
  index = np.arange(words.size, dtype=np.uint64)
  word = words ^ (index * 0x9E3779B1 % 2**32)
  for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
    word = (word ^ (word >> np.uint64(shift))) * np.uint64(factor) % 2**32
  return f'{int((word ^ (word >> np.uint64(16))).sum()) % 2**32:08x}'


@pytest.mark.parametrize(
    'dtype', ['float32', 'bfloat16', 'float16', 'int32', 'uint8', 'bool']
)
@pytest.mark.parametrize('shape', [(), (0,), (7,), (3, 5), (2, 3, 4)])
def test_the_digest_equals_numpys(dtype, shape):
  x = 50 * jax.random.normal(jax.random.key(0), shape)
  x = (x > 0) if dtype == 'bool' else x.astype(dtype)
  assert digest_arrays([x]) == {'0': reference(np.asarray(x))}


@settings(deadline=None)  # The first example compiles.
@given(st.integers(0, 10**4 * 4 - 1), st.integers(0, 7))
def test_every_flipped_bit_changes_the_digest(byte, bit):
  x = np.linspace(-1, 1, 10**4, dtype=np.float32).reshape(100, 100)
  flipped = x.copy()
  flipped.reshape(-1).view(np.uint8)[byte] ^= 1 << bit
  assert digest_arrays(x) != digest_arrays(flipped)


def test_order_and_shape_change_the_digest():
  x = jnp.arange(6.0)
  assert digest_arrays(x) != digest_arrays(x[::-1])
  assert digest_arrays(jnp.zeros(3)) != digest_arrays(jnp.zeros(4))


def test_the_digest_accepts_prng_keys():
  one, two = (digest_arrays(jax.random.key(seed)) for seed in (1, 2))
  assert one != two


@pytest.mark.sharding
def test_the_digest_does_not_depend_on_sharding():
  code = textwrap.dedent('''
      import jax
      jax.config.update('jax_num_cpu_devices', 8)
      from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
      from spdf_jax.training.checkpoints.identity import digest_arrays

      mesh = jax.make_mesh((8,), ('x',), axis_types=(AxisType.Auto,))
      x = jax.random.normal(jax.random.key(0), (16, 24))
      for spec in (P('x'), P(None, 'x'), P()):
        sharded = jax.device_put(x, NamedSharding(mesh, spec))
        assert digest_arrays(sharded) == digest_arrays(x), spec
  ''')
  run_python(code)
