# SPDX-License-Identifier: Apache-2.0
"""Closed-form programs: the training step of a decoder without tracing."""

from typing import NamedTuple

from spdf_jax.accelerator.wafer.program import check_sparsity
from spdf_jax.accelerator.wafer.program import Elementwise
from spdf_jax.accelerator.wafer.program import Host
from spdf_jax.accelerator.wafer.program import Operation
from spdf_jax.accelerator.wafer.program import Product
from spdf_jax.accelerator.wafer.program import Program
from spdf_jax.accelerator.wafer.program import Scores


class Decoder(NamedTuple):
  """Sizes of a decoder.

  Attributes:
    layers: Number of blocks.
    width: Width of the residual stream.
    hidden: Width of the feed-forward network.
    heads: Number of attention heads.
    vocabulary: Number of token ids.
    gated: Whether the feed-forward network has a third matrix.
    predicted: Fraction of the tokens to which the head is applied.
    keys: Total width of keys and of values; `None`: the width of the model.
  """

  layers: int
  width: int
  hidden: int
  heads: int
  vocabulary: int
  gated: bool = False
  predicted: float = 1.0
  keys: int | None = None

  @property
  def weights(self) -> int:
    """Number of weights of the matrices of the blocks."""
    keys = self.width if self.keys is None else self.keys
    attention = 2 * self.width * (self.width + keys)
    feed_forward = (2 + self.gated) * self.width * self.hidden
    return self.layers * (attention + feed_forward)


GPT_J = Decoder(28, 4096, 16384, 16, 50400)
LLAMA_7B = Decoder(32, 4096, 11008, 32, 32000, gated=True)
# The head is applied to the masked tokens only: 20 of 128.
BERT_LARGE = Decoder(24, 1024, 4096, 16, 30522, predicted=20 / 128)
GPT2_SMALL = Decoder(12, 768, 3072, 12, 50257)
GPT3_XL = Decoder(24, 2048, 8192, 16, 50257)


def training_step(
    decoder: Decoder, batch: int, length: int, sparsity: float = 0.0
) -> Program:
  """Returns a training step: forward pass, both gradients and the optimizer.

  Norms, activations and softmax take 30 d + 10 d_ff + 12 s heads operations per
  layer and token in the forward pass and twice that in the backward pass (an
  assumption).

  Args:
    decoder: Sizes of the decoder.
    batch: Number of sequences.
    length: Number of tokens of each sequence.
    sparsity: Fraction of zeros among the hidden weights.

  Returns:
    The program.

  Raises:
    ValueError: `batch` or `length` is not positive, or `sparsity` is not in
      [0, 1).

  Example:
    >>> step = training_step(Decoder(2, 64, 256, 4, 1000), 8, 128)
    >>> len(step.operations), step.operations[0].work.tokens
    (25, 1024)
  """
  for name, value in (('batch', batch), ('length', length)):
    if not value > 0:
      raise ValueError(f'{name} is {value}; it must be positive.')
  check_sparsity(sparsity)
  d, tokens = decoder.width, batch * length
  keys = d if decoder.keys is None else decoder.keys
  shapes = [('attention', d, d)] * 2 + [('attention', d, keys)] * 2
  shapes += [('mlp', d, decoder.hidden)] * (1 + decoder.gated)
  shapes += [('mlp', decoder.hidden, d)]
  operations = []
  for name, inputs, outputs in shapes:
    operations += _products(
        name, Product(tokens, inputs, outputs, sparsity), decoder.layers
    )
  head = Product(tokens * decoder.predicted, d, decoder.vocabulary)
  operations += _products('head', head, 1)
  scores = Scores(2 * tokens * length * d)
  per_token = 30 * d + 10 * decoder.hidden + 12 * length * decoder.heads
  for phase, times in (('forward', 1), ('backward', 2)):
    count = decoder.layers * times
    operations.append(Operation('attention', 'scores', phase, scores, count))
  operations += [
      Operation(
          '', 'elementwise', 'forward', Elementwise(tokens * per_token),
          3 * decoder.layers,
      ),
      Operation('', 'optimizer', 'backward', Host(0, 1)),
  ]
  return Program(tuple(operations))


def _products(layer: str, work: Product, count: int) -> list[Operation]:
  backward = work._replace(inputs=work.outputs, outputs=work.inputs)
  return [
      Operation(layer, 'product', 'forward', work, count),
      Operation(layer, 'product', 'backward', backward, count),
      Operation(
          layer, 'product', 'backward', work._replace(sampled=True), count
      ),
  ]
