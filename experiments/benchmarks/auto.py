"""Steps of `matmul='auto'` and `storage='auto'` over steps of dense products.

Both train the same static masks, of zeros anywhere and of 32 x 32 blocks.
Target: at no sparsity, width or dtype does the automatic choice lose more than
3 % (0.97). Up to the crossover it uses no kernels, the programs are equal, and
there is no row; but in a phase whose masks change and get sparser, steps before
that have a branch: the row of 0 % zeros.
"""

from collections.abc import Iterator, Sequence
import itertools
import re
from typing import Any

import numpy as np

from experiments.benchmarks import compiled
from experiments.benchmarks import measuring
from experiments.benchmarks import small_gpts
import spdf_jax as spdf
from spdf_jax import training
from spdf_jax.runs import style
from spdf_jax.sparsity import structures

WIDTHS = 64, 128, 256, 512, 1024
SPARSITIES = 0.5, 0.75, 0.9, 0.99
LEAST = 0.97
# Added to the crossover, for the lowest sparsity that is measured.
_ABOVE = 0.01


def measure(repeats: int, rng: np.random.Generator) -> Iterator[measuring.Row]:
  """Measures two layers of every width in both dtypes, on 4 x 128 tokens."""
  for in_blocks, dtype, width in itertools.product(
      (False, True), ('float32', 'bfloat16'), WIDTHS
  ):
    yield from measure_width(width, dtype, repeats, rng, in_blocks)


def measure_width(
    width: int,
    dtype: str,
    repeats: int,
    rng: np.random.Generator,
    in_blocks: bool = False,
) -> Iterator[measuring.Row]:
  """Measures one model at all sparsities at which kernels are used."""
  case = small_gpts.Case(
      f'd_model {width}, {dtype}{", blocks of 32" * in_blocks}',
      dict(n_layers=2, n_heads=width // 32, d_model=width, d_ff=4 * width,
           max_length=128, dtype=dtype),
      4, 128, max(1, 512 // width), 1,
  )
  subject = small_gpts.create_subject(case, rng)
  sparse = training.sparse_steps('auto', subject.model, 4 * 128, in_blocks)
  if sparse is None:
    return
  chain = small_gpts.chain_of(subject)
  structure = structures.block(32, 32) if in_blocks else 'unstructured'
  least = sparse.crossover + _ABOVE
  for sparsity in (0.0, *(s for s in (least, *SPARSITIES) if least <= s < 1)):
    optimizer = small_gpts.sparsified(
        chain, spdf.static(sparsity, structure=structure)
    )
    programs = [
        small_gpts.compile_step(subject, optimizer),
        small_gpts.compile_step(
            subject, optimizer, is_compact=sparsity > 0, sparse_steps=sparse
        ),
    ]
    timings = measuring.interleave(
        [compiled.repeated(program) for program in programs],
        repeats * case.steps, warmups=2,
    )
    yield measuring.sampled_row(
        case.name, f'{sparsity:.0%} zeros: dense step / auto, wall',
        timings.wall[0] / timings.wall[1], rng, target=LEAST, at_most=False,
    )


def plot(rows: Sequence[measuring.Row]) -> Any:
  """Plots the ratios over sparsity, a panel per kind and a line per width.

  The point at 0 is a step below the crossover, with a branch to kernels.
  """
  cases = list(dict.fromkeys(row.case for row in rows))
  kinds = list(dict.fromkeys(case.partition(', ')[2] for case in cases))
  lines = -(-len(kinds) // 2)  # Two panels each.
  figure = style.new_figure(8.4, 3.4 * lines)
  panels = figure.subplots(lines, 2, sharex=True, sharey=True).flatten()
  for ax, kind in zip(panels, kinds):
    of_kind = [case for case in cases if case.partition(', ')[2] == kind]
    for i, case in enumerate(of_kind):
      chosen = [row for row in rows if row.case == case]
      zeros = [int(re.match(r'\d+', row.metric)[0]) for row in chosen]
      values = [row.value for row in chosen]
      look = style.line_style(i)
      # No line to dense steps: between them and the crossover nothing differs.
      ax.plot(zeros[1:], values[1:], markersize=4, **look)
      ax.plot(
          zeros[0], values[0], look['marker'], color=look['color'],
          label=case.split(', ')[0].replace('d_model', 'width'), markersize=4,
      )
    ax.axhline(1, color=style.GREY, linewidth=0.8)
    ax.set(yscale='log')
    ax.set_yticks([1, 1.5, 2, 3, 4], ['1', '1.5', '2', '3', '4'])
    ax.minorticks_off()
    ax.set_title(kind, loc='left', fontweight='bold', fontsize=10)
    style.polish(ax)
  for ax in panels[-2:]:
    ax.set_xlabel('Zeros (%)')
  for ax in panels[::2]:
    ax.set_ylabel('Dense step time / auto step time')
  panels[0].legend(frameon=False, fontsize=8)
  return figure
