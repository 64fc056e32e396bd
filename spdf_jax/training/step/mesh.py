# SPDX-License-Identifier: Apache-2.0
"""The device mesh, with axes for data, fully sharded and tensor parallelism."""

from collections.abc import Callable, Mapping
import functools
import math
from typing import Any

import jax
from jax.sharding import AxisType
from jax.sharding import Mesh
from jax.sharding import NamedSharding

from spdf_jax import data
from spdf_jax import models
from spdf_jax.sparsity import like_params
from spdf_jax.sparsity.trees import path_name

PyTree = Any

AXES = ('data', 'fsdp', 'tensor')
"""Mesh axes. `data` splits batches; `fsdp` splits batches and the storage of
the parameters; `tensor` splits the layers."""


def create_mesh(data: int = -1, fsdp: int = 1, tensor: int = 1) -> Mesh:
  """Arranges all devices in a mesh of three axes.

  Args:
    data: Replicas of the parameters; -1: as many as the devices allow.
    fsdp: Devices that share the storage of one replica.
    tensor: Devices that share the computation of every layer.

  Returns:
    The mesh with the axes `AXES`, of type Auto.

  Raises:
    ValueError: the sizes do not multiply to the number of devices.

  Example:
    >>> create_mesh().size == jax.device_count()
    True
  """
  sizes = mesh_sizes(jax.device_count(), data=data, fsdp=fsdp, tensor=tensor)
  return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def mesh_sizes(
    devices: int, *, data: int = -1, fsdp: int = 1, tensor: int = 1
) -> tuple[int, int, int]:
  """Resolves the sizes of a mesh's axes, in the order of `AXES`.

  Raises:
    ValueError: a size is neither positive nor -1, more than one is -1, or the
      sizes do not multiply to the number of devices.

  Example:
    >>> mesh_sizes(8, fsdp=4)
    (2, 4, 1)
  """
  sizes = dict(data=data, fsdp=fsdp, tensor=tensor)
  check_axes(sizes)
  open_axes = [name for name, size in sizes.items() if size == -1]
  given = math.prod(size for size in sizes.values() if size != -1)
  if open_axes and devices % given == 0:
    sizes[open_axes[0]] = devices // given
  elif open_axes or given != devices:
    raise ValueError(
        f'mesh is {sizes}, but there are {devices} devices; give sizes with '
        f'the product {devices}, where -1 takes all remaining devices.'
    )
  return sizes['data'], sizes['fsdp'], sizes['tensor']


def check_axes(sizes: Mapping[str, int]) -> None:
  """Raises ValueError unless sizes are positive, at most one of them -1."""
  values = list(sizes.values())
  if values.count(-1) > 1 or any(size < 1 and size != -1 for size in values):
    raise ValueError(
        f'mesh is {dict(sizes)}; give positive sizes, at most one of them -1, '
        'which takes all remaining devices.'
    )


def simulate_devices(mesh: Mapping[str, int]) -> None:
  """Simulates the devices of a mesh on the CPU, to compile a step for it.

  Call it before JAX initializes its devices. A mesh whose given sizes are all 1
  uses the existing devices.

  Args:
    mesh: Sizes of axes, as `create_mesh` takes them; an axis of size -1 gets
      one device.
  """
  devices = math.prod(max(size, 1) for size in mesh.values())
  if devices > 1:
    jax.config.update('jax_platforms', 'cpu')
    jax.config.update('jax_num_cpu_devices', devices)


def shard_shapes(mesh: Mesh, state: PyTree) -> PyTree:
  """Attaches shardings to the shapes of a train state.

  Args:
    mesh: Mesh of `create_mesh`.
    state: A `TrainState` of shapes.

  Returns:
    The shapes, each with a `NamedSharding`: parameters by `partition_spec`,
    masks and moments like their parameters, and all else replicated.
  """
  put = lambda x, sharding: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=sharding, weak_type=x.weak_type
  )
  params = jax.tree_util.tree_map_with_path(
      lambda path, x: put(x, NamedSharding(mesh, models.partition_spec(
          path_name(path), x.shape, mesh.shape
      ))),
      state.params,
  )
  return jax.tree.map(put, state, like_params.state_shardings(state, params))


def check_batches(mesh: Mesh, batch_size: int, micro_batches: int) -> None:
  """Raises ValueError unless devices can share every micro-batch evenly."""
  rows, shares = batch_size // micro_batches, _shares(mesh)
  if rows % shares:
    raise ValueError(
        f'a batch of {batch_size} in {micro_batches} micro-batches leaves '
        f'{rows} rows, which {shares} devices (mesh axes data and fsdp) cannot '
        'share evenly; change batch_size, micro_batches or mesh.'
    )


def batch_sharding(mesh: Mesh, batch_size: int) -> NamedSharding:
  """Returns the sharding of batches on a mesh.

  Args:
    mesh: Mesh of `create_mesh`.
    batch_size: Number of rows.

  Returns:
    The sharding of rows over `data` and `fsdp`; replicated if these do not
    divide the rows evenly.

  Example:
    >>> batch_sharding(create_mesh(), 8).mesh.axis_names
    ('data', 'fsdp', 'tensor')
  """
  split = batch_size % _shares(mesh) == 0
  return NamedSharding(mesh, jax.P(('data', 'fsdp')) if split else jax.P())


def place_batch(
    mesh: Mesh, read: Callable[[slice], data.Batch], shape: tuple[int, int]
) -> data.Batch:
  """Places a batch on the mesh; each process reads its own rows only.

  Args:
    mesh: Mesh of `create_mesh`.
    read: Function from a slice of rows to those rows of the batch.
    shape: Shape of the whole batch, [B, L].

  Returns:
    The batch, sharded by `batch_sharding`.
  """
  sharding = batch_sharding(mesh, shape[0])
  cached = functools.cache(lambda start, stop: read(slice(start, stop)))

  def field(number: int) -> jax.Array:
    def part(index: Any) -> Any:
      return cached(*index[0].indices(shape[0])[:2])[number]

    return jax.make_array_from_callback(shape, sharding, part)

  return data.Batch(*map(field, range(len(data.Batch._fields))))


def _shares(mesh: Mesh) -> int:
  return mesh.shape['data'] * mesh.shape['fsdp']
