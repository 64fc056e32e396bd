# SPDX-License-Identifier: Apache-2.0
"""BLEU by the definitions of three official scripts, computed by sacrebleu."""

from collections.abc import Sequence
from typing import Any

from spdf_jax.evaluation.metrics.segments import streams
from spdf_jax.extras import require

Groups = Sequence[Sequence[str]]


def mteval_bleu(hypotheses: Sequence[str], references: Groups) -> float:
  """Computes BLEU of mteval-v13a: 13a tokens, case-insensitive.

  Args:
    hypotheses: One generation for each input.
    references: References of each hypothesis.

  Returns:
    BLEU in percent.

  Raises:
    ImportError: sacrebleu is not installed.

  Example:
    >>> round(mteval_bleu(['a b c d e.'], [['A B C D E.', 'x']]), 4)
    100.0
  """
  return _bleu(
      hypotheses, streams(references), tokenize='13a', lowercase=True
  )


def multi_bleu(hypotheses: Sequence[str], references: Groups) -> float:
  """Computes BLEU of multi-bleu.perl -lc: split at spaces, case-insensitive.

  A missing reference counts as one of length 0, like an empty line in the
  script's files.

  Args:
    hypotheses: One tokenized generation for each input.
    references: Tokenized references of each hypothesis.

  Returns:
    BLEU in percent.

  Raises:
    ImportError: sacrebleu is not installed.

  Example:
    >>> round(multi_bleu(['A b c d', 'e'], [['a b c d'], ['e', 'f']]), 4)
    100.0
  """
  return _bleu(
      hypotheses,
      streams(references, empty=True),
      tokenize='none',
      lowercase=True,
  )


def multi_bleu_detok(hypotheses: Sequence[str], references: Groups) -> float:
  """Computes BLEU of multi-bleu-detok.perl: 13a tokens, case-sensitive.

  A missing reference counts as one of length 0, like an empty line in the
  script's files.

  Args:
    hypotheses: One generation for each input.
    references: References of each hypothesis.

  Returns:
    BLEU in percent.

  Raises:
    ImportError: sacrebleu is not installed.

  Example:
    >>> multi_bleu_detok(['A B C D.'], [['a b c d.']]) < 50
    True
  """
  return _bleu(
      hypotheses,
      streams(references, empty=True),
      tokenize='13a',
      lowercase=False,
  )


def _bleu(
    hypotheses: Sequence[str],
    reference_streams: list[list[str | None]],
    **settings: Any,
) -> float:
  # No smoothing: the scripts give 0 where an n-gram order has no match.
  metric = require('sacrebleu', 'eval').BLEU(
      smooth_method='none', force=True, **settings
  )
  return float(metric.corpus_score(list(hypotheses), reference_streams).score)
