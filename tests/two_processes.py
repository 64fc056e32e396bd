"""Trains the tiny run as one of several processes: WORKDIR MESH [STEP].

At the step, if one is given, the second process is killed.
"""

import dataclasses
import json
import os
import signal
import sys

import jax

from spdf_jax import training
from spdf_jax.sparsity.trees import path_name
from spdf_jax.training.loop.processes import join_processes
from tests.tiny_run import make_run


def main(workdir, mesh, killed_at=None):
  join_processes(timeout=20)
  run = make_run(**{
      f'mesh__{axis}': size for axis, size in json.loads(mesh).items()
  })
  run = dataclasses.replace(run)  # Its step is compiled for this mesh.
  batch_at = run.programs.batch_at

  def read(step, rows):
    if str(step) == killed_at and jax.process_index() == 1:
      os.kill(os.getpid(), signal.SIGKILL)
    assert jax.process_count() == 1 or rows == own_rows(run, step)
    return batch_at(step, rows)

  vars(run.programs)['batch_at'] = read
  run = run.open(workdir)
  assert_split(run.state)
  training.train(run)


def assert_split(state):
  """Asserts that a kernel, its mask and its moments are stored in halves."""
  def shapes(tree):
    return {
        leaf.addressable_shards[0].data.shape
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if 'wi/kernel' in path_name(path)
    }

  assert shapes(state.params) == shapes(state.opt_state) == {(8, 16)}


def own_rows(run, step):
  """Returns half of the rows if two processes can share them."""
  size = run.plan.phase_at(step).batch_size
  if size % 2:
    return slice(0, size)
  half = size // 2
  return slice(jax.process_index() * half, (jax.process_index() + 1) * half)


if __name__ == '__main__':
  main(*sys.argv[1:])
