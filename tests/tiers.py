"""The tier of each case of a parametrized test."""

import pytest


def slow_except(default, cases):
  """Moves all cases but those of `default` to the slow tier."""
  return [
      case if case in default else pytest.param(
          *(case if isinstance(case, tuple) else (case,)),
          marks=pytest.mark.slow,
      )
      for case in cases
  ]
