# SPDX-License-Identifier: Apache-2.0
"""Exact top-k masks, per layer or over a whole model.

Scores are mapped to uint32 keys, those of 64 bits to two; smaller keys rank
first. A radix select finds the threshold, the key of the last kept entry. Very
small layers compare all pairs of entries instead. Ties are broken by random
bits, if a key is given, and then in row-major order. There is no sort and no
gather, and sharded scores exchange only counts.
"""

from spdf_jax.sparsity.topk.per_layer import keep_largest as keep_largest
from spdf_jax.sparsity.topk.per_layer import keep_random as keep_random
from spdf_jax.sparsity.topk.whole_model import (
    keep_largest_of_all as keep_largest_of_all,
)
from spdf_jax.sparsity.topk.whole_model import keep_of_model as keep_of_model
