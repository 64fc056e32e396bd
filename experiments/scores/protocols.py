"""Protocols: definitions of the text metrics in published tables."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import os
from typing import NamedTuple

from experiments.scores.metrics import captions
from experiments.scores.metrics import edits
from experiments.scores.metrics import meteor
from experiments.scores.metrics import ngrams
from experiments.scores.metrics import why_no_meteor
from spdf_jax.evaluation import texts
from spdf_jax.names import lookup

Metric = Callable[[list[str], list[list[str]]], float]
Prepare = Callable[[str], str]


class Scores(NamedTuple):
  """Scores of generations under a protocol.

  Attributes:
    protocol: Name of the protocol, to report with every score.
    values: Scores by metric; None for a metric that could not be computed.
    reasons: Reason for each metric that could not be computed.
  """

  protocol: str
  values: dict[str, float | None]
  reasons: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Protocol:
  """Preparation of texts, and the metrics computed on them.

  Attributes:
    prepare: Function applied to every hypothesis and reference.
    metrics: Metrics of the official script, by name.
    pick: Function that selects and pads the references of a segment.
    words: Function from a prepared text to METEOR's input.
  """

  prepare: Prepare
  metrics: Mapping[str, Metric | None]
  pick: Callable[[list[str]], list[str]] = list
  words: Prepare = lambda text: text


def _caption_text(text: str) -> str:
  return ' '.join(texts.caption_words(text))


def _on_treebank_words(metric: Metric) -> Metric:
  """Applies a metric to nltk's tokens, as GenerationEval does."""
  split = texts.treebank_words

  def on_words(hypotheses, references):
    return metric(
        [split(text) for text in hypotheses],
        [[split(text) for text in group] for group in references],
    )

  return on_words


def _padded_with_first(references: list[str], count: int) -> list[str]:
  return (references + references[:1] * count)[:count]


def _padded_with_empty(references: list[str], count: int) -> list[str]:
  return (references + [''] * count)[:count]


# METEOR is None, since `score_texts` calls it with the user's jar; its key
# fixes the order of the scores.
_E2E = dict(
    bleu=ngrams.mteval_bleu, nist=ngrams.nist, meteor=None,
    rouge_l=captions.rouge_l, cider=captions.cider,
)
_TRIPLES = dict(bleu=ngrams.multi_bleu, meteor=None, ter=edits.ter)
_GENERATION_EVAL = {
    'bleu': ngrams.multi_bleu_detok,
    'meteor': None,
    'chrf++': ngrams.chrf_plus_plus,
    'ter_segment_minima': _on_treebank_words(edits.ter_segment_minima),
}
_EVERY = {
    **_E2E, 'ter': edits.ter, 'ter_segment_minima': edits.ter_segment_minima,
    'chrf++': ngrams.chrf_plus_plus,
}

PROTOCOLS: Mapping[str, Protocol] = {
    # The E2E challenge's measure_scores.py on the raw references.
    'e2e_raw': Protocol(lambda text: text, _E2E, words=_caption_text),
    # The same with -p, on the tokenized references of Hu et al.; a model that
    # was fine-tuned on these generates text with the same tokenization.
    'lora_e2e': Protocol(
        lambda text: text, _E2E | dict(nist=ngrams.nist_python),
        words=_caption_text,
    ),
    # The script of the WebNLG 2017 challenge: ASCII, three references.
    'webnlg17': Protocol(
        lambda text: texts.split_at_non_words(
            texts.fold_to_ascii(text.lower())
        ),
        _TRIPLES,
        pick=functools.partial(_padded_with_empty, count=3),
    ),
    # GenerationEval of WebNLG 2020, on six references of Hu et al.
    'lora_webnlg': Protocol(
        lambda text: texts.split_at_non_words(text.lower()),
        _GENERATION_EVAL,
        pick=functools.partial(_padded_with_first, count=6),
        words=texts.treebank_words,
    ),
    # The script of DART's authors: three references.
    'dart': Protocol(
        lambda text: texts.split_at_non_words(text).lower(),
        _TRIPLES,
        pick=functools.partial(_padded_with_empty, count=3),
    ),
    # GenerationEval of WebNLG 2020 on unprepared texts.
    'generation_eval': Protocol(
        lambda text: text, _GENERATION_EVAL, words=texts.treebank_words,
    ),
}
"""Protocols by name; scores of different protocols are not comparable."""


def score_texts(
    hypotheses: Sequence[str],
    references: texts.References,
    protocol: str,
    *,
    metrics: Sequence[str] | None = None,
    meteor_jar: str | os.PathLike[str] | None = None,
) -> Scores:
  """Scores generations by the definitions of an official script.

  BLEU and chrF++ are in percent; every other metric has the scale that its
  script prints.

  Args:
    hypotheses: One generation for each input.
    references: One or several raw references of each hypothesis; the protocol
      tokenizes and pads them.
    protocol: A name of `PROTOCOLS`.
    metrics: Names of the metrics; None: those of the official script. Others
      are computed on the texts that the protocol prepares.
    meteor_jar: Path of `meteor-1.5.jar`; None: the score `'meteor'` is None.

  Returns:
    The scores, with the protocol's name.

  Raises:
    ImportError: sacrebleu or nltk is not installed.
    ValueError: a name is unknown, the lengths differ, or a reference is
      missing.

  Example:
    >>> scores = score_texts(['A b c d.'], ['a b c d.'], 'e2e_raw')
    >>> scores.protocol, round(scores.values['bleu'], 2)
    ('e2e_raw', 100.0)
    >>> scores.values['meteor'], scores.reasons['meteor']
    (None, 'METEOR needs its Java program: give the path of meteor-1.5.jar.')
  """
  rules = lookup('protocol', protocol, PROTOCOLS)
  known = {**_EVERY, **rules.metrics}
  names = list(rules.metrics) if metrics is None else list(metrics)
  for name in names:
    lookup('metric', name, known)
  groups = texts.group_references(hypotheses, references)
  prepared = [rules.prepare(text) for text in hypotheses]
  groups = [
      rules.pick([rules.prepare(text) for text in group]) for group in groups
  ]
  values: dict[str, float | None] = {}
  reasons: dict[str, str] = {}
  for name in names:
    metric = known[name]
    if metric is not None:
      values[name] = metric(prepared, groups)
      continue
    reason = why_no_meteor(meteor_jar)
    if reason:
      values[name], reasons[name] = None, reason
    elif meteor_jar is not None:
      try:
        values[name] = meteor(
            [rules.words(text) for text in prepared],
            [[rules.words(text) for text in group] for group in groups],
            jar=meteor_jar,
        )
      except RuntimeError as error:  # The Java program failed.
        values[name], reasons[name] = None, str(error)
  return Scores(protocol, values, reasons)
