# SPDX-License-Identifier: Apache-2.0
"""Evaluation of a model: loss, generation, text metrics and n-gram baselines.

An evaluator is a function `evaluate(step, params)` that owns its data and
yields `(name, value)` pairs, e.g. `('validation/loss', 3.2)`.
"""

from spdf_jax.evaluation.beam_search import beam_search
from spdf_jax.evaluation.beam_search import BeamSearch
from spdf_jax.evaluation.beam_search import PROTOCOLS
from spdf_jax.evaluation.bigram import Bigram
from spdf_jax.evaluation.bigram import bigram_loss
from spdf_jax.evaluation.bigram import bigram_probabilities
from spdf_jax.evaluation.bigram import count_bigrams
from spdf_jax.evaluation.bigram import fit_bigram
from spdf_jax.evaluation.bigram import LARGEST_VOCABULARY
from spdf_jax.evaluation.decoders import CachedModel
from spdf_jax.evaluation.decoders import Decoder
from spdf_jax.evaluation.generation import generate
from spdf_jax.evaluation.generation import greedy
from spdf_jax.evaluation.generation import sampler
from spdf_jax.evaluation.harness import harness_model
from spdf_jax.evaluation.harness import Subject
from spdf_jax.evaluation.harness_suites import run_suite
from spdf_jax.evaluation.harness_suites import SUITES
from spdf_jax.evaluation.harness_suites import SuiteScores
from spdf_jax.evaluation.lambada import read_lambada
from spdf_jax.evaluation.lambada import score_lambada
from spdf_jax.evaluation.likelihood import Continuation
from spdf_jax.evaluation.likelihood import Likelihood
from spdf_jax.evaluation.likelihood import score_continuations
from spdf_jax.evaluation.local_tasks import local_tasks
from spdf_jax.evaluation.metrics import score_texts
from spdf_jax.evaluation.metrics import Scores
from spdf_jax.evaluation.perplexity import batch_sums
from spdf_jax.evaluation.perplexity import bits_per_byte
from spdf_jax.evaluation.perplexity import evaluate_loss
from spdf_jax.evaluation.perplexity import Loss
from spdf_jax.evaluation.perplexity import loss_evaluator
from spdf_jax.evaluation.streaming import stream
from spdf_jax.evaluation.targets import target_perplexity
from spdf_jax.evaluation.task_evaluator import bleu
from spdf_jax.evaluation.task_evaluator import chrf
from spdf_jax.evaluation.task_evaluator import task_evaluator
from spdf_jax.evaluation.task_evaluator import write_json_lines
from spdf_jax.evaluation.trigram import fit_trigram
from spdf_jax.evaluation.trigram import Trigram
from spdf_jax.evaluation.trigram import trigram_loss
from spdf_jax.evaluation.trigram import trigram_probabilities
from spdf_jax.evaluation.wikitext import adjusted_perplexity

__all__ = [
    'LARGEST_VOCABULARY',
    'PROTOCOLS',
    'SUITES',
    'BeamSearch',
    'Bigram',
    'CachedModel',
    'Continuation',
    'Decoder',
    'Likelihood',
    'Loss',
    'Scores',
    'Subject',
    'SuiteScores',
    'Trigram',
    'adjusted_perplexity',
    'batch_sums',
    'beam_search',
    'bigram_loss',
    'bigram_probabilities',
    'bits_per_byte',
    'bleu',
    'chrf',
    'count_bigrams',
    'evaluate_loss',
    'fit_bigram',
    'fit_trigram',
    'generate',
    'greedy',
    'harness_model',
    'local_tasks',
    'loss_evaluator',
    'read_lambada',
    'run_suite',
    'sampler',
    'score_continuations',
    'score_lambada',
    'score_texts',
    'stream',
    'target_perplexity',
    'task_evaluator',
    'trigram_loss',
    'trigram_probabilities',
    'write_json_lines',
]
