"""Paths of real data and programs that are not part of the project."""

import os
import pathlib

import pytest


def data_path(*parts):
  """Returns a path below `SPDF_DATA`, or skips the test with the reason."""
  root = os.environ.get('SPDF_DATA')
  if not root:
    pytest.skip('SPDF_DATA names no folder of real data')
  path = pathlib.Path(root, *parts)
  if not path.exists():
    pytest.skip(f'{path} is not in SPDF_DATA')
  return path


def clone_path(name, *parts):
  """Returns a path in the clone `name` below `SPDF_CLONES`, or skips."""
  root = os.environ.get('SPDF_CLONES')
  if not root:
    pytest.skip('SPDF_CLONES names no folder of clones of other repositories')
  path = pathlib.Path(root, name, *parts)
  if not path.exists():
    pytest.skip(f'{path} is not in SPDF_CLONES')
  return path


def meteor_jar():
  """Returns the path in `METEOR_JAR`, or skips the test with the reason."""
  from experiments.scores.metrics import why_no_meteor
  jar = os.environ.get('METEOR_JAR')
  reason = why_no_meteor(jar)
  if reason:
    pytest.skip(f'{reason} Tests take it from METEOR_JAR.')
  return jar
