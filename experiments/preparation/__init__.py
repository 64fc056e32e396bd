"""Preparation of corpora: documents become token files."""

from experiments.preparation.files import prepare_files
from experiments.preparation.files import prepare_shard
from experiments.preparation.shards import join_shards
from experiments.preparation.state import PreparationProgress

__all__ = [
    'PreparationProgress', 'join_shards', 'prepare_files', 'prepare_shard',
]
