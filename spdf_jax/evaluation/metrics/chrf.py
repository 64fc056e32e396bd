# SPDX-License-Identifier: Apache-2.0
"""chrF++: F-score of character and word n-grams, computed by sacrebleu."""

from collections.abc import Sequence

from spdf_jax.evaluation.metrics.segments import streams
from spdf_jax.evaluation.metrics.segments import without_empty
from spdf_jax.extras import require


def chrf_plus_plus(
    hypotheses: Sequence[str], references: Sequence[Sequence[str]]
) -> float:
  """Computes corpus chrF++: 6 character and 2 word orders, β = 2.

  References without a word are ignored.

  Args:
    hypotheses: One generation for each input.
    references: References of each hypothesis.

  Returns:
    The score of the corpus, 0 to 1.

  Raises:
    ImportError: sacrebleu is not installed.

  Source: Popović 2017, "chrF++: words helping character n-grams".

  Example:
    >>> chrf_plus_plus(['Return the name.'], [['', 'Return the name.']])
    1.0
  """
  metric = require('sacrebleu', 'eval').CHRF(
      word_order=2, eps_smoothing=True  # Averages orders as chrF++.py does.
  )
  result = metric.corpus_score(
      list(hypotheses), streams(without_empty(references))
  )
  return float(result.score) / 100.0
