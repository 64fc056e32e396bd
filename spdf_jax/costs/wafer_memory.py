# SPDX-License-Identifier: Apache-2.0
"""Batch sizes that fit a wafer, by the memory of resident activations."""

from typing import NamedTuple

from spdf_jax.accelerator.wafer.device import WaferDevice
from spdf_jax.models import DecoderConfig


class BatchAdvice(NamedTuple):
  """Numbers of sequences that a system can process at a time.

  Attributes:
    largest: Maximum number for which the working set of every product fits.
    advised: Maximum number for which also the inputs of all layers fit, stored
      for the backward pass; at least 1.
    working_set: Bytes of input and output of the largest product, per sequence.
    stash: Bytes of the inputs of all layers, per sequence.
  """

  largest: int
  advised: int
  working_set: float
  stash: float


def advise_batch(
    config: DecoderConfig, device: WaferDevice, length: int
) -> BatchAdvice:
  """Returns the micro-batch sizes that fit the wafer's SRAM.

  A product needs memory for its input and output; for the head these include
  the logits. The stash is layers × tokens × width values of 16 bits: a step
  whose stash does not fit must recompute or reload the inputs of layers, which
  is not costed.

  Args:
    config: Sizes of the decoder.
    device: One system of the device.
    length: Number of tokens of a sequence.

  Returns:
    The numbers of sequences and their memory.

  Raises:
    ValueError: One sequence does not fit.

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
  """Returns the number of micro-batches into which a system splits its batch.

  Example:
    >>> from spdf_jax.accelerator.wafer import create_device
    >>> from spdf_jax.models import PRESETS
    >>> micro_batches(PRESETS['gpt3-xl'], create_device('cs2'), 512, 2048)
    3
  """
  largest = advise_batch(config, device, length).largest
  return -(-batch_size // largest)
