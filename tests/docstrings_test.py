"""Tests of spdf_jax.data.tasks."""

import pytest

from spdf_jax.data import tasks
from spdf_jax.data.stdlib import module_split


@pytest.fixture(scope='module')
def task():
  return tasks.load_task('python-docstrings')


def test_the_task_has_thousands_of_pairs_in_three_splits(task):
  sizes = [len(task.train), len(task.validation), len(task.test)]
  assert 5_000 < sum(sizes) < 8_000
  assert sizes[0] > 0.85 * sum(sizes)
  assert min(sizes) > 0.03 * sum(sizes)


def test_pairs_are_in_the_split_of_their_module(task):
  for split in ('train', 'validation', 'test'):
    for pair in getattr(task, split):
      module = pair.context.split(' ')[0]
      assert module_split(module) == split


def test_no_context_is_in_the_task_twice(task):
  pairs = (*task.train, *task.validation, *task.test)
  assert len({pair.context for pair in pairs}) == len(pairs)


def test_targets_are_one_line_of_text(task):
  for _, target in (*task.train, *task.validation, *task.test):
    assert target and target == target.strip()
    assert len(target.splitlines()) == 1


def test_the_task_is_the_same_every_time(task):
  again = tasks.load_task('python-docstrings')
  assert again == task
  assert again.fingerprint == task.fingerprint


def test_functions_methods_and_coroutines_are_read():
  source = '''
import sys
def plain(a, *, b: int = 2) -> str:
  """Does it."""
class Outer:
  """Is no function."""
  class Inner:
    async def method(self, item):
      """
      Waits for `item`.

      And more.
      """
      def helper():
        "Helps."
if sys.platform == 'win32':
  def guarded(): "Guards."
'''
  assert tasks.docstring_pairs('pkg.mod', source) == [
      tasks.Pair('pkg.mod plain(a, *, b: int=2) -> str', 'Does it.'),
      tasks.Pair('pkg.mod Outer.Inner.method(self, item)', 'Waits for `item`.'),
      tasks.Pair('pkg.mod Outer.Inner.method.helper()', 'Helps.'),
      tasks.Pair('pkg.mod guarded()', 'Guards.'),
  ]


def test_docstrings_that_describe_nothing_are_left_out():
  source = '''
def silent(): pass
def empty(): ""
def blank(): """   """
def mark(): """+"""
def prompt():
  """
  >>> import io
  """
'''
  assert tasks.docstring_pairs('mod', source) == []


def test_the_first_of_equal_signatures_counts():
  source = '''
def f(a): "First."
def f(a): "Second."
def f(a, b): "Other."
'''
  assert tasks.docstring_pairs('mod', source) == [
      tasks.Pair('mod f(a)', 'First.'), tasks.Pair('mod f(a, b)', 'Other.')
  ]


def test_an_unknown_task_is_answered_with_the_nearest_name():
  with pytest.raises(ValueError, match="'docstrings'.*'python-docstrings'"):
    tasks.load_task('docstrings')
