# SPDX-License-Identifier: Apache-2.0
"""Data: tokens and batches, as pure functions of (seed, step)."""

from spdf_jax.data.batches import Allotment
from spdf_jax.data.batches import evaluation_batches
from spdf_jax.data.batches import schedule_batches
from spdf_jax.data.corpora import Corpus
from spdf_jax.data.corpora import open_corpus
from spdf_jax.data.corpora import prepare_corpus
from spdf_jax.data.corpora import read_tokenizer
from spdf_jax.data.corpora import write_corpus
from spdf_jax.data.examples import encode_pairs
from spdf_jax.data.sources import Batch
from spdf_jax.data.sources import PlannedCorpus
from spdf_jax.data.sources import PlannedExamples
from spdf_jax.data.sources import PlannedTokenizer
from spdf_jax.data.sources import Source
from spdf_jax.data.sources import Windows
from spdf_jax.data.tasks import Input
from spdf_jax.data.tasks import load_task
from spdf_jax.data.tasks import Pair
from spdf_jax.data.tasks import Task
from spdf_jax.data.tokenizer_files import export_tokenizer
from spdf_jax.data.tokenizer_files import open_tokenizer
from spdf_jax.data.tokenizer_files import tokenizer_paths
from spdf_jax.data.tokenizers import ByteTokenizer
from spdf_jax.data.tokenizers import LibraryTokenizer
from spdf_jax.data.tokenizers import Tokenizer
from spdf_jax.data.tokenizers import train_bpe
from spdf_jax.data.tokenizers import with_special_tokens

__all__ = [
    'Allotment',
    'Batch',
    'ByteTokenizer',
    'Corpus',
    'Input',
    'LibraryTokenizer',
    'Pair',
    'PlannedCorpus',
    'PlannedExamples',
    'PlannedTokenizer',
    'Source',
    'Task',
    'Tokenizer',
    'Windows',
    'encode_pairs',
    'evaluation_batches',
    'export_tokenizer',
    'load_task',
    'open_corpus',
    'open_tokenizer',
    'prepare_corpus',
    'read_tokenizer',
    'schedule_batches',
    'tokenizer_paths',
    'train_bpe',
    'with_special_tokens',
    'write_corpus',
]
