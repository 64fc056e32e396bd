"""Primitives without a rule are listed, and users add rules."""


import jax
from jax.extend.core import Primitive
import pytest
from wafer_programs import DEVICE
from wafer_programs import TOKENS
from wafer_programs import WIDTH
from wafer_programs import X

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
