"""BLEU as three official scripts compute it, by sacrebleu."""

from collections.abc import Sequence

from spdf_jax.evaluation.metrics.segments import streams
from spdf_jax.extras import require

Groups = Sequence[Sequence[str]]


def mteval_bleu(hypotheses: Sequence[str], references: Groups) -> float:
  """Scores by mteval-v13a: its tokenizer, any case.

  Args:
    hypotheses: One generation for each input.
    references: For each hypothesis its references.

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
  """Scores by multi-bleu.perl -lc: words between spaces, any case.

  A missing reference counts as one of length 0, as an empty line does there.

  Args:
    hypotheses: One generation for each input, tokenized.
    references: For each hypothesis its references, tokenized.

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
  """Scores by multi-bleu-detok.perl: 13a tokens, upper is not lower case.

  A missing reference counts as one of length 0, as an empty line does there.

  Args:
    hypotheses: One generation for each input.
    references: For each hypothesis its references.

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


def _bleu(hypotheses, reference_streams, **settings) -> float:
  # Scripts give 0 where an order has no match: no smoothing.
  metric = require('sacrebleu', 'eval').BLEU(
      smooth_method='none', force=True, **settings
  )
  return float(metric.corpus_score(list(hypotheses), reference_streams).score)
