"""Tokens in, batches out: everything a pure function of (seed, step)."""

from spdf_jax.data.batches import (
    Allotment,
    evaluation_batches,
    schedule_batches,
)
from spdf_jax.data.corpora import Corpus, prepare_corpus
from spdf_jax.data.examples import encode_pairs, Examples
from spdf_jax.data.permutations import permute
from spdf_jax.data.sources import Batch, Source, Windows
from spdf_jax.data.stdlib import module_sources, module_split
from spdf_jax.data.tasks import load_task, Pair, Task
from spdf_jax.data.token_files import (
    open_token_file,
    TokenFile,
    verify_token_file,
    write_token_file,
)
from spdf_jax.data.tokenizers import (
    BPETokenizer,
    ByteTokenizer,
    load_tokenizer,
    save_tokenizer,
    Tokenizer,
    train_bpe,
)

__all__ = [
    'Allotment',
    'BPETokenizer',
    'Batch',
    'ByteTokenizer',
    'Corpus',
    'Examples',
    'Pair',
    'Source',
    'Task',
    'TokenFile',
    'Tokenizer',
    'Windows',
    'encode_pairs',
    'evaluation_batches',
    'load_task',
    'load_tokenizer',
    'module_sources',
    'module_split',
    'open_token_file',
    'permute',
    'prepare_corpus',
    'save_tokenizer',
    'schedule_batches',
    'train_bpe',
    'verify_token_file',
    'write_token_file',
]
