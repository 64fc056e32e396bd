# SPDX-License-Identifier: Apache-2.0
"""Evaluation of a model: loss, generation, tasks and a bigram.

An evaluator is a function `evaluate(step, params)` that owns its data and
yields `(name, value)` pairs, e.g. `('validation/loss', 3.2)`.
"""

from spdf_jax.evaluation.baselines import bigram_loss
from spdf_jax.evaluation.baselines import LARGEST_VOCABULARY
from spdf_jax.evaluation.beam_search import beam_search
from spdf_jax.evaluation.beam_search import BeamSearch
from spdf_jax.evaluation.beam_search import PROTOCOLS
from spdf_jax.evaluation.cached_decoding import CachedModel
from spdf_jax.evaluation.generation import decode_stream
from spdf_jax.evaluation.generation import generate
from spdf_jax.evaluation.generation import greedy
from spdf_jax.evaluation.generation import sampler
from spdf_jax.evaluation.generation import stream
from spdf_jax.evaluation.harness import harness_model
from spdf_jax.evaluation.harness import Subject
from spdf_jax.evaluation.likelihood import Continuation
from spdf_jax.evaluation.likelihood import score_continuations
from spdf_jax.evaluation.loss import bits_per_byte
from spdf_jax.evaluation.loss import evaluate_loss
from spdf_jax.evaluation.loss import loss_evaluator
from spdf_jax.evaluation.loss import TokenLoss
from spdf_jax.evaluation.task_evaluator import bleu
from spdf_jax.evaluation.task_evaluator import chrf
from spdf_jax.evaluation.task_evaluator import task_evaluator
from spdf_jax.evaluation.task_evaluator import write_json_lines

__all__ = [
    'LARGEST_VOCABULARY',
    'PROTOCOLS',
    'BeamSearch',
    'CachedModel',
    'Continuation',
    'Subject',
    'TokenLoss',
    'beam_search',
    'bigram_loss',
    'bits_per_byte',
    'bleu',
    'chrf',
    'decode_stream',
    'evaluate_loss',
    'generate',
    'greedy',
    'harness_model',
    'loss_evaluator',
    'sampler',
    'score_continuations',
    'stream',
    'task_evaluator',
    'write_json_lines',
]
