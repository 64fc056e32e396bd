"""The tier of each case of a parametrized test."""

import pytest


def _mark_except(mark, default, cases):
  return [
      case if case in default or getattr(case, 'marks', ()) else pytest.param(
          *(case if isinstance(case, tuple) else (case,)), marks=mark
      )
      for case in cases
  ]


def ci_except(default, cases):
  """Moves all cases but those of `default`, and marked ones, to the ci tier."""
  return _mark_except(pytest.mark.ci, default, cases)


def slow_except(default, cases):
  """Moves all cases but those of `default` to the slow tier."""
  return _mark_except(pytest.mark.slow, default, cases)
