"""Meshes: sizes, how parameters are split, and what is refused."""

import types

import jax
import jax.numpy as jnp
import pytest

from spdf_jax import models
from spdf_jax.models.decoder import HIDDEN_KERNELS
from spdf_jax.sparsity.trees import path_name
from spdf_jax.training.step import mesh
from tests.tiny_run import make_run

pytestmark = pytest.mark.sharding

MESH = dict(data=2, fsdp=4, tensor=2)


@pytest.mark.parametrize('sizes, devices', [
    (dict(data=-1, fsdp=16, tensor=1), 16), (dict(data=2, fsdp=2, tensor=2), 8),
    (dict(data=-1, fsdp=1, tensor=1), None),
    (dict(data=1, fsdp=1, tensor=1), None),
])
def test_the_devices_that_a_mesh_needs_are_simulated(
    sizes, devices, monkeypatch
):
  set_to = {}
  monkeypatch.setattr(
      jax, 'config', types.SimpleNamespace(update=set_to.__setitem__)
  )
  mesh.simulate_devices(sizes)
  assert set_to.get('jax_num_cpu_devices') == devices


@pytest.mark.parametrize('axes, sizes', [
    (dict(), (8, 1, 1)),
    (dict(fsdp=4), (2, 4, 1)),
    (dict(data=2, fsdp=-1, tensor=2), (2, 2, 2)),
    (dict(data=1, fsdp=8, tensor=1), (1, 8, 1)),
])
def test_an_axis_of_size_minus_1_takes_the_remaining_devices(axes, sizes):
  assert mesh.mesh_sizes(8, **axes) == sizes


@pytest.mark.parametrize('axes, message', [
    (dict(data=3), "'data': 3.* but there are 8 devices; .* product 8"),
    (dict(fsdp=3), 'but there are 8 devices'),
    (dict(data=-1, fsdp=-1), 'at most one of them -1'),
    (dict(tensor=0), 'give positive sizes'),
    (dict(tensor=-2), 'give positive sizes'),
])
def test_an_impossible_mesh_is_refused(axes, message):
  with pytest.raises(ValueError, match=message):
    mesh.mesh_sizes(8, **axes)


class _Mesh:
  shape = MESH


@pytest.mark.parametrize('batch_size, parts', [(12, 1), (16, 4), (8, 2)])
def test_batches_that_devices_cannot_share_are_refused(batch_size, parts):
  with pytest.raises(ValueError, match=f'{batch_size // parts} rows, which 8'):
    mesh.check_batches(_Mesh(), batch_size, parts)


def test_batches_that_devices_can_share_are_taken():
  mesh.check_batches(_Mesh(), 16, 2)


@pytest.mark.parametrize('name', sorted(models.PRESETS))
def test_every_large_parameter_of_every_preset_is_split(name):
  model = models.create_model(name, scan_layers=True)
  tokens = jnp.zeros((1, 2), jnp.int32)
  shapes = jax.eval_shape(model.init, jax.random.key(0), tokens)['params']
  for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
    spec = models.partition_spec(path_name(path), leaf.shape, MESH)
    assert len(spec) in (0, len(leaf.shape))
    split = {axis for axis in spec if axis}
    layer = '/'.join(path_name(path).split('/')[-3:])
    if layer in HIDDEN_KERNELS:
      assert split == {'fsdp', 'tensor'}, layer
      assert spec[0] is None  # Layers are scanned over.
    elif leaf.size > 2**20 and not layer.endswith(('bias', 'scale')):
      assert split, path_name(path)


@pytest.mark.parametrize('reader, writer', [
    ('attn/wq', 'attn/wd'), ('mlp/wi', 'mlp/wo'), ('mlp/wg', 'mlp/wo'),
])
def test_outputs_of_a_layer_are_split_as_the_next_layer_expects(reader, writer):
  spec = lambda layer: models.partition_spec(
      f'h_0/{layer}/kernel', (16, 16), MESH
  )
  assert spec(reader)[1] == spec(writer)[0] == 'tensor'


def test_a_batch_is_placed_as_it_was_read():
  run = make_run()
  read = lambda rows: run.programs.batch_at(3, rows)
  placed = mesh.place_batch(mesh.create_mesh(), read, (2, 8))
  for actual, expected in zip(placed, run.programs.batch_at(3)):
    assert actual.dtype == expected.dtype
    assert (actual == expected).all()
