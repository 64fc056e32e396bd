"""A candidate: a trained model with what it takes to measure it."""

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
  """A trained model with what it takes to measure it.

  Attributes:
    name: Where it comes from.
    model: The Flax module.
    params: Its parameters.
    tokenizer: Makes its tokens.
    config: Config of the run; `None` for a model from elsewhere.

  Raises:
    ValueError: the tokenizer has more tokens than the model.
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
    """What the harness, and what scores likelihoods, take."""
    apply = lambda params, tokens: self.model.apply({'params': params}, tokens)
    return Subject(
        jax.jit(apply), self.params, self.tokenizer,
        self.model.config.max_length, CachedModel(self.model),
    )
