"""Training steps of PyTorch beside ours, dense and sparse, in one process.

A GPT with four layers takes steps on four sequences of 256 tokens with AdamW,
from the same parameters: in PyTorch, eager and compiled by `torch.compile`, and
here, dense and with kept values only at 75 and 90 % sparsity; each in float32
and bfloat16, and in bfloat16 with masks of 32 x 32 blocks. All take turns. The
first losses of the dense steps are compared, which shows that they compute the
same.

Targets in the model of width 768: over PyTorch's fastest step, ours in its
faster dtype is at least 0.8 times as fast dense, 1.9 times at 75 % and 2.7
times at 90 %; in float32, over PyTorch's fastest in float32, 1.0, 2.5 and 3.9
times. With AMX, blocks over the fastest dense step in bfloat16, PyTorch's or
ours: 1.2, 1.6 and 2.0 times at 50, 75 and 90 %.

Without PyTorch the suite is skipped with a warning. jaxpruner is not measured:
it calls `jax.tree_map`, which current versions of JAX no longer have.
"""

from collections.abc import Callable, Iterator
import dataclasses
import functools
import logging
from typing import Any

import numpy as np

from experiments.benchmarks import compiled
from experiments.benchmarks import dense_training
from experiments.benchmarks import measuring
from experiments.benchmarks import pytorch
from experiments.benchmarks import small_gpts
from experiments.benchmarks import train_step
import spdf_jax as spdf
from spdf_jax import models
from spdf_jax import training
from spdf_jax.accelerator import native
from spdf_jax.sparsity import structures

DTYPES = ('float32', 'bfloat16')
_OVER_FASTEST = {0.0: 0.8, 0.75: 1.9, 0.9: 2.7}
"""Smallest speed-up of our faster dtype over PyTorch's fastest step."""
_IN_FLOAT32 = {0.0: 1.0, 0.75: 2.5, 0.9: 3.9}
"""Smallest speed-up in float32 over PyTorch's fastest step in float32."""
_IN_BLOCKS = {0.5: 1.2, 0.75: 1.6, 0.9: 2.0}
"""Smallest speed-up of blocks over the fastest dense step in bfloat16."""
_LARGEST_DIFFERENCE = {'float32': 1e-4, 'bfloat16': 2e-2}
"""Largest difference of the first loss from PyTorch's in float32, by dtype."""
CASES = (
    small_gpts.CASES[2]._replace(name='width 512'),
    train_step.WIDE._replace(name='width 768'),
)


def measure(repeats: int, rng: np.random.Generator) -> Iterator[measuring.Row]:
  """Measures all cases.

  Args:
    repeats: Rounds of timing.
    rng: Random generator of tokens and the bootstrap.

  Yields:
    Rows.
  """
  if not pytorch.is_installed():
    logging.warning(pytorch.MISSING)
    return
  for case in CASES:
    yield from measure_case(case, repeats, rng)


def measure_case(
    case: small_gpts.Case, repeats: int, rng: np.random.Generator
) -> Iterator[measuring.Row]:
  """Measures the steps of one model; see `measure`."""
  subject = small_gpts.create_subject(case, rng)
  calls: dict[tuple[str, ...], Callable[[], Any]] = {}
  for dtype in DTYPES:
    for mode in ('eager', 'compiled'):
      calls['PyTorch', dtype, mode] = _torch_step(subject, dtype, mode)
    for sparsity in _OVER_FASTEST:
      calls['ours', dtype, f'{sparsity:.0%} zeros'] = compiled.repeated(
          compile_step(subject, case, dtype, sparsity)
      )
  in_blocks = {
      sparsity: ('ours', 'bfloat16', f'{sparsity:.0%} zeros in blocks')
      for sparsity in _IN_BLOCKS if native.is_available('bfloat16')
  }
  for sparsity, key in in_blocks.items():
    calls[key] = compiled.repeated(compile_step(
        subject, case, 'bfloat16', sparsity, structures.block(32, 32)
    ))
  first = {}
  for key, call in calls.items():  # Compiles and warms up.
    result = call()
    first[key] = float(
        result if key[0] == 'PyTorch' else result[1]['train/loss']
    )
    call()
  timings = measuring.interleave(list(calls.values()), repeats, warmups=1)
  wall = dict(zip(calls, timings.wall))
  for key, seconds in wall.items():
    yield measuring.sampled_row(
        case.name, ' '.join(key) + ', wall ms', 1e3 * seconds, rng
    )
  fastest = lambda keys: min(keys, key=lambda key: np.median(wall[key]))
  peers = [key for key in wall if key[0] == 'PyTorch']
  row = functools.partial(
      measuring.sampled_row, case.name, rng=rng, at_most=False
  )
  for sparsity, target in _OVER_FASTEST.items():
    zeros = f'{sparsity:.0%} zeros'
    peer = fastest(peers)
    own = fastest([('ours', dtype, zeros) for dtype in DTYPES])
    yield row(
        f'{zeros}: {" ".join(peer)} / ours {own[1]}',
        samples=wall[peer] / wall[own],
        target=target if case.name == 'width 768' else None,
    )
    peer = fastest([key for key in peers if key[1] == 'float32'])
    yield row(
        f'{zeros}: {" ".join(peer)} / ours float32',
        samples=wall[peer] / wall['ours', 'float32', zeros],
        target=_IN_FLOAT32[sparsity] if case.name == 'width 768' else None,
    )
  for sparsity, key in in_blocks.items():
    peer = fastest([
        key for key in wall
        if key[1] == 'bfloat16' and key[2] in ('eager', 'compiled', '0% zeros')
    ])
    has_target = case.name == 'width 768' and native.has_matrix_unit()
    yield row(
        f'{key[2]}: {" ".join(peer)} / ours bfloat16',
        samples=wall[peer] / wall[key],
        target=_IN_BLOCKS[sparsity] if has_target else None,
    )
  reference = first['PyTorch', 'float32', 'eager']
  for key, loss in first.items():
    if key[2] in ('eager', 'compiled', '0% zeros'):
      yield measuring.counted_row(
          case.name, ' '.join(key) + ', difference of the first loss',
          abs(loss - reference), target=_LARGEST_DIFFERENCE[key[1]],
      )


def _torch_step(
    subject: small_gpts.Subject, dtype: str, mode: str
) -> Callable[[], float]:
  plan = subject.plan
  return pytorch.create_step(
      subject.model.config,
      subject.params,
      subject.batch,
      dtype=dtype,
      is_compiled=mode == 'compiled',
      learning_rate=float(plan.learning_rate(1)),
      weight_decay=plan.phases[0].weight_decay,
      **subject.settings,
  )


def compile_step(
    subject: small_gpts.Subject,
    case: small_gpts.Case,
    dtype: str,
    sparsity: float,
    structure: structures.Structure | str = 'unstructured',
) -> compiled.Program:
  """Compiles a step of a model, with kept values only if it is sparse.

  Args:
    subject: The model, with its parameters and batch.
    case: Sizes of the model and the batch.
    dtype: Dtype of the computation.
    sparsity: Sparsity of the static mask; 0 for a dense step.
    structure: Structure of the mask.

  Returns:
    The program.
  """
  config = dataclasses.replace(subject.model.config, dtype=dtype)
  model = models.model_of(config)
  subject = subject._replace(model=model)
  chain = small_gpts.chain_of(subject)
  if not sparsity:
    return small_gpts.compile_step(subject, chain, dense_training.train_step)
  sparse = training.sparse_steps(
      'native', model, case.batch_size * case.length
  )
  return small_gpts.compile_step(
      subject,
      small_gpts.sparsified(
          chain, spdf.static(sparsity, structure=structure)
      ),
      is_compact=True, sparse_steps=sparse,
  )
