"""Primitives without a rule are listed, and users add rules."""

import jax
from jax.extend.core import Primitive
import jax.numpy as jnp
import numpy as np
import pytest
from wafer_programs import DEVICE
from wafer_programs import products
from wafer_programs import TOKENS
from wafer_programs import WIDTH
from wafer_programs import X

from spdf_jax.accelerator import sparse_matmul
from spdf_jax.accelerator.wafer import register_cost
from spdf_jax.accelerator.wafer import simulate
from spdf_jax.accelerator.wafer.program import Elementwise


def define(name):
  primitive = Primitive(name)
  primitive.def_abstract_eval(lambda x: x)
  return primitive


def test_what_has_no_rule_is_counted_and_listed():
  mystery = define('mystery')
  f = lambda x: jax.lax.scan(
      lambda x, _: (mystery.bind(x), None), x, None, length=6
  )[0]
  report = simulate(f, DEVICE)(X)
  assert report.unknown == {'mystery': 6} and report.cycles == 0
  assert (report * 2 + report).unknown == {'mystery': 18}


def test_users_teach_the_cost_of_their_primitives():
  taught = define('taught')
  register_cost(taught, lambda eqn: [Elementwise(3 * eqn.size)])
  report = simulate(lambda x: taught.bind(x), DEVICE)(X)
  assert report.flops == 3 * TOKENS * WIDTH and not report.unknown
  with pytest.raises(ValueError, match="'taught' has a rule"):
    register_cost('taught', lambda eqn: [])


@pytest.mark.parametrize('sampled', [False, True])
def test_the_backward_product_has_the_transposed_mask(sampled):
  mask = np.zeros((8, 32), bool)
  mask[0] = True
  x = jax.ShapeDtypeStruct((TOKENS, 8), jnp.float32)
  w = jax.ShapeDtypeStruct(mask.shape, jnp.float32)
  loss = lambda x, w: sparse_matmul(x, w, mask).sum()
  backward = jax.grad(loss, argnums=(0, 1) if sampled else 0)
  works = [row.operation.work for row in products(simulate(backward, DEVICE)(
      x, w
  ))]
  (dx,) = (v for v in works if (v.inputs, v.outputs) == (32, 8))
  # All non-zeros of dx's matrix are in one output, hence in every column.
  assert dx.mask.imbalance(4, 8) == 1
  assert dx.kept == 32 and not dx.sampled
  assert [(v.inputs, v.outputs) for v in works if v.sampled] == (
      [(8, 32)] * sampled
  )
  assert all(
      v.mask.imbalance(4, 32) == 4 for v in works if v is not dx
  )
