"""Text metrics: corpus BLEU and chrF of generations, by sacrebleu."""

from collections.abc import Sequence

from spdf_jax.extras import require

References = Sequence[str | Sequence[str]]


def _streams(
    hypotheses: Sequence[str], references: References
) -> list[list[str | None]]:
  """Turns references per hypothesis into sacrebleu's aligned streams."""
  if len(hypotheses) != len(references):
    raise ValueError(
        f'hypotheses has {len(hypotheses)} entries and references has '
        f'{len(references)}; give the references of each hypothesis.'
    )
  if not len(hypotheses):
    raise ValueError('hypotheses is empty; give at least one to score.')
  groups = [[r] if isinstance(r, str) else list(r) for r in references]
  for index, group in enumerate(groups):
    if not group:
      raise ValueError(
          f'references[{index}] is empty; give at least one reference for '
          'each hypothesis.'
      )
  count = max(map(len, groups))
  # sacrebleu leaves None out; an empty string is a reference of length 0.
  return [
      [group[i] if i < len(group) else None for group in groups]
      for i in range(count)
  ]


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
  streams = _streams(hypotheses, references)
  metric = require('sacrebleu', 'eval').BLEU(force=True)
  return float(metric.corpus_score(list(hypotheses), streams).score)


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
  streams = _streams(hypotheses, references)
  metric = require('sacrebleu', 'eval').CHRF()
  return float(metric.corpus_score(list(hypotheses), streams).score)
