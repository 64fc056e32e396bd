# SPDX-License-Identifier: Apache-2.0
"""Text metrics, each by the definition of an official script."""

from spdf_jax.evaluation.metrics.captions import cider
from spdf_jax.evaluation.metrics.captions import rouge_l
from spdf_jax.evaluation.metrics.edits import ter
from spdf_jax.evaluation.metrics.edits import ter_segment_minima
from spdf_jax.evaluation.metrics.meteor import meteor
from spdf_jax.evaluation.metrics.meteor import why_no_meteor
from spdf_jax.evaluation.metrics.ngrams import chrf_plus_plus
from spdf_jax.evaluation.metrics.ngrams import mteval_bleu
from spdf_jax.evaluation.metrics.ngrams import multi_bleu
from spdf_jax.evaluation.metrics.ngrams import multi_bleu_detok
from spdf_jax.evaluation.metrics.ngrams import nist
from spdf_jax.evaluation.metrics.ngrams import nist_python

__all__ = [
    'chrf_plus_plus',
    'cider',
    'meteor',
    'mteval_bleu',
    'multi_bleu',
    'multi_bleu_detok',
    'nist',
    'nist_python',
    'rouge_l',
    'ter',
    'ter_segment_minima',
    'why_no_meteor',
]
