# SPDX-License-Identifier: Apache-2.0
"""A candidate: a trained model together with its tokenizer."""

import dataclasses
from typing import Any

import jax

from spdf_jax import data
from spdf_jax import models
from spdf_jax.evaluation.decoders import CachedModel
from spdf_jax.evaluation.harness import Subject

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Candidate:
  """A trained model together with its tokenizer.

  Attributes:
    name: Name of the model's source, e.g. its run.
    model: The Flax module.
    params: Parameters of the model.
    tokenizer: Tokenizer of the model.
    config: Config of the run; `None` for a model that no run has trained.

  Raises:
    ValueError: The tokenizer has more tokens than the model.
  """

  name: str
  model: models.GPT | models.Llama
  params: PyTree
  tokenizer: data.Tokenizer
  config: Any = None

  def __post_init__(self):
    tokens, vocabulary = self.tokenizer.vocab_size, self.model.config.vocab_size
    if tokens > vocabulary:
      raise ValueError(
          f'{self.name} has a vocabulary of {vocabulary} and its tokenizer '
          f'{tokens} tokens; give the tokenizer that it was trained with.'
      )

  @property
  def subject(self) -> Subject:
    """The candidate as a `Subject` of the harness and of likelihoods."""
    apply = lambda params, tokens: self.model.apply({'params': params}, tokens)
    return Subject(
        jax.jit(apply), self.params, self.tokenizer,
        self.model.config.max_length, CachedModel(self.model),
    )
