"""Text metrics, each by the definition of an official script."""

from experiments.scores.metrics.captions import cider
from experiments.scores.metrics.captions import rouge_l
from experiments.scores.metrics.edits import ter
from experiments.scores.metrics.edits import ter_segment_minima
from experiments.scores.metrics.meteor import meteor
from experiments.scores.metrics.meteor import why_no_meteor
from experiments.scores.metrics.ngrams import multi_bleu
from experiments.scores.metrics.ngrams import nist
from experiments.scores.metrics.ngrams import nist_python

__all__ = [
    'cider',
    'meteor',
    'multi_bleu',
    'nist',
    'nist_python',
    'rouge_l',
    'ter',
    'ter_segment_minima',
    'why_no_meteor',
]
