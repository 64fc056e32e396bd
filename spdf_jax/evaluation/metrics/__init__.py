# SPDX-License-Identifier: Apache-2.0
"""Text metrics by the protocols of published tables."""

from spdf_jax.evaluation.metrics.protocols import Protocol
from spdf_jax.evaluation.metrics.protocols import PROTOCOLS
from spdf_jax.evaluation.metrics.protocols import score_texts
from spdf_jax.evaluation.metrics.protocols import Scores

__all__ = ['PROTOCOLS', 'Protocol', 'Scores', 'score_texts']
