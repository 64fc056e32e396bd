"""FLOPs, parameters and tokens that the papers print, cell by cell."""

from collections.abc import Mapping
from typing import NamedTuple

Row = tuple[str | float, ...]


class Printed(NamedTuple):
  """A table of a paper, or numbers in its text.

  Attributes:
    source: Paper and place.
    columns: Names of the columns.
    rows: Cells as they are printed, separated by spaces, by the row's label,
      such as a model and its sparsity.
  """

  source: str
  columns: tuple[str, ...]
  rows: Mapping[Row, str]

  def cell(self, row: Row, column: str) -> str:
    """Returns a cell as it is printed."""
    return self.rows[row].split()[self.columns.index(column)]


SMALL, XL = 'gpt2-small', 'gpt3-xl'
TASKS = ('E2E', 'WebNLG', 'DART', 'Curation')

SIZES = Printed(
    'SPDF, appendix, table 1',
    ('parameters', 'tokens'),
    {(SMALL,): '125M 2.5B', (XL,): '1.3B 26B'},
)

PRETRAINING = Printed(
    'SPDF, appendix, table 2',
    ('sequences', 'FLOPs/seq', 'FLOPs', 'exaFLOPs', 'of dense'),
    {
        (SMALL, 0.0): '1.22e6 1.99e12 2.43e18 2.43 1x',
        (SMALL, 0.5): '1.22e6 1.47e12 1.79e18 1.79 0.737x',
        (SMALL, 0.75): '1.22e6 1.20e12 1.46e18 1.46 0.601x',
        (XL, 0.0): '1.27e7 1.86e13 2.36e20 236.10 1x',
        (XL, 0.5): '1.27e7 1.12e13 1.42e20 141.87 0.601x',
        (XL, 0.75): '1.27e7 7.46e12 9.48e19 94.76 0.401x',
    },
)

FINE_TUNING = Printed(
    'SPDF, appendix, table 3',
    ('FLOPs/seq', 'FLOPs', 'exaFLOPs'),
    {
        (SMALL, 'E2E'): '1.36e11 5.15e16 0.052',
        (XL, 'E2E'): '1.39e12 5.27e17 0.524',
        (SMALL, 'WebNLG'): '1.36e11 2.21e16 0.022',
        (XL, 'WebNLG'): '1.39e12 2.26e17 0.226',
        (SMALL, 'DART'): '1.36e11 5.12e16 0.051',
        (XL, 'DART'): '1.39e12 5.24e17 0.524',
        (SMALL, 'Curation'): '1.36e11 1.38e16 0.014',
        (XL, 'Curation'): '1.39e12 1.41e17 0.141',
    },
)
SEQUENCES = {
    'E2E': '1.26e5', 'WebNLG': '0.54e5', 'DART': '1.25e5', 'Curation': '0.34e5',
}
"""Column "Total Seq" of the same table: sequences read in fine-tuning."""

TOTALS = Printed(
    'SPDF, table 2',
    tuple(name for task in TASKS for name in (task, f'{task} speedup')),
    {
        (SMALL, 0.0): '2.48 1.00x 2.48 1.00x 2.45 1.00x 2.44 1.00x',
        (SMALL, 0.5): '1.84 1.34x 1.82 1.35x 1.84 1.34x 1.81 1.35x',
        (SMALL, 0.75): '1.52 1.64x 1.49 1.65x 1.52 1.64x 1.48 1.65x',
        (XL, 0.0): '236.62 1.00x 236.62 1.00x 236.33 1.00x 236.32 1.00x',
        (XL, 0.5): '142.40 1.66x 142.10 1.66x 142.01 1.66x 142.40 1.66x',
        (XL, 0.75): '95.29 2.48x 94.98 2.49x 95.29 2.48x 94.90 2.49x',
    },
)

SHARES = Printed(
    'SPDF, section 3.5',
    ('attention', 'vocabulary', 'reduction at 75%'),
    {(SMALL,): '13.3% 27% 1.65x', (XL,): '13.3% 6.8% 2.5x'},
)

V_SMALL, V_LARGE = 'cerebras-gpt-256m', 'cerebras-gpt-6.7b'
VARIABLE = Printed(
    'Variable SPDF, "Improves over SPDF"; appendix, table 5',
    ('effective sparsity', 'FLOPs of static 75%'),
    {(V_SMALL, 'split'): '75% 1x'},
)
VARIABLE_LARGE = Printed(
    'Variable SPDF, "Scaling" and figure 5',
    ('effective sparsity', 'fewer FLOPs', 'fine-tuning'),
    {(V_LARGE, 'extended'): '75% 64% <0.05%'},
)
STAGE_STEPS, STAGE_SPARSITIES = (62_523, 9_379), (0.9, 0.0)
"""Steps and sparsities of the stages of the extended 6.7B run. The post does
not print them; they are those of its configs in Cerebras' model zoo. Stage 1 is
the standard budget."""
SPLIT_SHARES, SPLIT_SPARSITIES = (5 / 6, 1 / 6), (0.9, 0.0)
"""Shares of the standard budget and sparsities of the stages: with 90 % in the
first one, the effective sparsity is 75 %."""
BATCH, LENGTH = 1040, 2048
DART_STEPS, DART_BATCH = 1938, 32
"""Batch sizes, sequence length and steps of the 6.7B run and of its
fine-tuning, from the same configs."""

PRUNED = 'gpt3-1.3b'
ITERATIVE = Printed(
    'Iterative pruning, text and figure 3',
    ('inference FLOPs', 'parameters', 'weights'),
    {(PRUNED, 0.838): '3x 4.3x 6.2x'},
)
# The 300B tokens are from SPDF, section 3.
BUDGETS = Printed(
    'Iterative pruning, introduction and method',
    ('FLOPs', 'tokens'),
    {('gpt3-175b', 300e9): '3.14e23 –', (PRUNED, 26e9): '– ~26B'},
)

TABLES = {
    'spdf': (SIZES, PRETRAINING, FINE_TUNING, TOTALS, SHARES),
    'variable': (VARIABLE, VARIABLE_LARGE),
    'iterative': (ITERATIVE, BUDGETS),
}
"""Printed tables of each paper, by the name for `--table`. Table 1 of the post
on iterative pruning and the tables of the Llama runs are images, whose numbers
are not in the text."""
