"""What fits a wafer: batches, by the activations that must be resident."""

from typing import NamedTuple

from spdf_jax.accelerator.wafer.device import WaferDevice
from spdf_jax.models import DecoderConfig


class BatchAdvice(NamedTuple):
  """How many sequences a system takes at a time.

  Attributes:
    largest: That the working set of every product fits.
    advised: That also the inputs of all layers fit, kept for the backward
      pass; at least 1.
    working_set: Bytes of the largest product, per sequence.
    stash: Bytes of the layers' inputs, per sequence.
  """

  largest: int
  advised: int
  working_set: float
  stash: float


def advise_batch(
    config: DecoderConfig, device: WaferDevice, length: int
) -> BatchAdvice:
  """Advises a micro-batch under the limit of the wafer's SRAM.

  A product keeps its input and output; the head's logits count when it is the
  largest. The stash is layers × tokens × width, 16 bits each: a step that
  exceeds it must compute or fetch layers' inputs again, which is not costed.

  Args:
    config: The decoder's sizes.
    device: One system.
    length: Tokens of a sequence.

  Returns:
    The advice.

  Raises:
    ValueError: one sequence does not fit.

  Example:
    >>> from spdf_jax.accelerator.wafer import create_device
    >>> from spdf_jax.models import PRESETS
    >>> found = advise_batch(PRESETS['gpt3-xl'], create_device('cs2'), 2048)
    >>> found.advised, found.largest  # The vendor's configs take 132.
    (186, 186)
  """
  bytes_each = device.value_bits / 8
  widths = config.d_ff, config.vocab_size, config.d_model
  working_set = length * (config.d_model + max(widths)) * bytes_each
  stash = config.n_layers * length * config.d_model * bytes_each
  largest = int(device.sram // working_set)
  if not largest:
    raise ValueError(
        f'one sequence of {length:,} tokens keeps {working_set / 1e9:.1f} GB '
        f'of activations and {device.name} has {device.sram / 1e9:.1f} GB; '
        'shorten the sequence.'
    )
  advised = max(1, min(largest, int(device.sram // stash)))
  return BatchAdvice(largest, advised, working_set, stash)


def micro_batches(
    config: DecoderConfig, device: WaferDevice, batch_size: int, length: int
) -> int:
  """Returns in how many parts a system takes its batch, so that each fits.

  Example:
    >>> from spdf_jax.accelerator.wafer import create_device
    >>> from spdf_jax.models import PRESETS
    >>> micro_batches(PRESETS['gpt3-xl'], create_device('cs2'), 512, 2048)
    3
  """
  largest = advise_batch(config, device, length).largest
  return -(-batch_size // largest)
