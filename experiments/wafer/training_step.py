"""A training step on the wafer, from the sizes of a model, without tracing."""

from spdf_jax import models
from spdf_jax.accelerator.wafer.program import check_sparsity
from spdf_jax.accelerator.wafer.program import Elementwise
from spdf_jax.accelerator.wafer.program import Host
from spdf_jax.accelerator.wafer.program import Operation
from spdf_jax.accelerator.wafer.program import Product
from spdf_jax.accelerator.wafer.program import Program
from spdf_jax.accelerator.wafer.program import ScoreProduct


def training_step(
    config: models.DecoderConfig,
    batch: int,
    length: int,
    sparsity: float = 0.0,
    *,
    predicted: float = 1.0,
) -> Program:
  """Returns the operations of a training step, from sizes, without tracing.

  The program has the forward pass, the gradients of inputs and of weights, and
  the optimizer. Norms, activations and softmax take
  `30 d_model + 10 d_ff + 12 length n_heads` operations per layer and token in
  the forward pass and twice that in the backward pass (an assumption).

  Args:
    config: Config of the model, e.g. `GPTConfig` or an entry of `PRESETS`.
    batch: Number of sequences.
    length: Number of tokens of each sequence.
    sparsity: Fraction of zeros in the weights of attention and MLP.
    predicted: Fraction of the tokens to which the head is applied.

  Returns:
    The program, whose cost `accelerator.wafer.report_on` estimates.

  Raises:
    ValueError: `batch` or `length` is not positive, or `sparsity` is not in
      [0, 1).

  Example:
    >>> config = models.GPTConfig(1000, 2, 4, 64, 256, 128)
    >>> step = training_step(config, 8, 128)
    >>> len(step.operations), step.operations[0].work.tokens
    (25, 1024)
  """
  for name, value in (('batch', batch), ('length', length)):
    if not value > 0:
      raise ValueError(f'{name} is {value}; it must be positive.')
  check_sparsity(sparsity)
  layers, d, tokens = config.n_layers, config.d_model, batch * length
  width, keys = config.attention_width, config.keys_width
  matrices = [
      ('attention', d, width), ('attention', width, d),
      *[('attention', d, keys)] * 2,
      *[('mlp', d, config.d_ff)] * (1 + config.gated), ('mlp', config.d_ff, d),
  ]
  operations = []
  for name, inputs, outputs in matrices:
    operations += _products(
        name, Product(tokens, inputs, outputs, sparsity), layers
    )
  head = Product(tokens * predicted, d, config.vocab_size)
  operations += _products('head', head, 1)
  scores = ScoreProduct(2 * tokens * length * width)
  per_token = 30 * d + 10 * config.d_ff + 12 * length * config.n_heads
  for phase, times in (('forward', 1), ('backward', 2)):
    operations.append(
        Operation('attention', 'scores', phase, scores, layers * times)
    )
  operations += [
      Operation(
          '', 'elementwise', 'forward', Elementwise(tokens * per_token),
          3 * layers,
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
