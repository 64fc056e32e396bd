# SPDX-License-Identifier: Apache-2.0
"""Comparison of our models with those of transformers."""

import os

import jax
import numpy as np

from spdf_jax.interop.huggingface import load_hf
from spdf_jax.interop.tensor_files import require_unlisted
from spdf_jax.models import model_of


def check_hf(
    directory: str | os.PathLike[str],
    tokens_BxL: np.ndarray | None = None,
    *,
    allow_non_finite: bool = False,
) -> float:
  """Compares the logits of a directory's model with those of transformers.

  Both compute in float32. This needs torch and transformers, which no extra
  installs.

  Args:
    directory: Directory with a model that `load_hf` reads, not compact.
    tokens_BxL: Token ids; `None`: two random sequences of up to 64 tokens.
    allow_non_finite: Whether weights may be infinite or NaN.

  Returns:
    The largest absolute difference.

  Raises:
    ValueError: `load_hf` cannot read the directory.
    ImportError: torch or transformers is not installed.

  Example:
    >>> check_hf('gpt2')  # doctest: +SKIP
    4.9e-05
  """
  torch, transformers = map(require_unlisted, ('torch', 'transformers'))
  config, params, _ = load_hf(directory, allow_non_finite=allow_non_finite)
  if tokens_BxL is None:
    tokens_BxL = np.random.default_rng(0).integers(
        config.vocab_size, size=(2, min(64, config.max_length))
    )
  theirs = transformers.AutoModelForCausalLM.from_pretrained(
      directory, dtype=torch.float32, attn_implementation='eager'
  )
  with torch.no_grad():
    logits_BxLxV = theirs(torch.tensor(np.asarray(tokens_BxL))).logits.numpy()
  with jax.default_matmul_precision('highest'):
    ours_BxLxV = model_of(config).apply({'params': params}, tokens_BxL)
  return float(np.abs(np.asarray(ours_BxLxV) - logits_BxLxV).max())
