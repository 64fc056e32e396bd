"""Text metrics: corpus BLEU and chrF of generations, by sacrebleu."""

from collections.abc import Sequence

from spdf_jax.evaluation.metrics.segments import group_references
from spdf_jax.evaluation.metrics.segments import References
from spdf_jax.evaluation.metrics.segments import streams
from spdf_jax.extras import require


def bleu(hypotheses: Sequence[str], references: References) -> float:
  """Scores generations by corpus BLEU, 0 to 100.

  sacrebleu's defaults: 13a tokenization, cased, 4-grams, exponential
  smoothing of orders without a match. Other protocols are other numbers.

  Args:
    hypotheses: One generation for each input.
    references: For each hypothesis one reference or several of them.

  Returns:
    BLEU of the whole corpus, in percent.

  Raises:
    ValueError: Lengths differ, or there is nothing to score.
    ImportError: sacrebleu is not installed.

  Source: Papineni et al. 2002; Post 2018, "A Call for Clarity".

  Example:
    >>> round(bleu(['The cat sat on a mat.'], ['The cat sat on the mat.']), 2)
    48.89
  """
  aligned = streams(group_references(hypotheses, references))
  metric = require('sacrebleu', 'eval').BLEU(force=True)
  return float(metric.corpus_score(list(hypotheses), aligned).score)


def chrf(hypotheses: Sequence[str], references: References) -> float:
  """Scores generations by corpus chrF2, 0 to 100.

  sacrebleu's defaults: character 1- to 6-grams without spaces, no word
  n-grams, recall weighted twice as much as precision.

  Args:
    hypotheses: One generation for each input.
    references: For each hypothesis one reference or several of them.

  Returns:
    chrF of the whole corpus, in percent.

  Raises:
    ValueError: Lengths differ, or there is nothing to score.
    ImportError: sacrebleu is not installed.

  Source: Popović 2015, "chrF: character n-gram F-score".

  Example:
    >>> chrf(['Return the name.'], [['Returns a name.', 'Return the name.']])
    100.0
  """
  aligned = streams(group_references(hypotheses, references))
  metric = require('sacrebleu', 'eval').CHRF()
  return float(metric.corpus_score(list(hypotheses), aligned).score)
