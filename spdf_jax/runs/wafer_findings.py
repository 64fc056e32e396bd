# SPDX-License-Identifier: Apache-2.0
"""Findings on the modeled wafer: the estimated time of a finished run."""

from collections.abc import Mapping
from typing import Any

from spdf_jax.accelerator.wafer import create_device
from spdf_jax.accelerator.wafer import report_on
from spdf_jax.accelerator.wafer.closed_form import Decoder
from spdf_jax.accelerator.wafer.closed_form import training_step
from spdf_jax.costs.flops import ModelShape
from spdf_jax.costs.simulation_text import duration
from spdf_jax.runs.read import Run

_LEAST_SPEEDUP = 1.02  # Smaller differences are within the model's error.


def decoder_of(model: Mapping[str, Any]) -> Decoder | None:
  """Returns the sizes of a run's model, or `None` if they are not recorded.

  Example:
    >>> sizes = dict(n_layers=2, d_model=8, n_heads=2, d_ff=32, vocab_size=64)
    >>> decoder_of(sizes).hidden
    32
  """
  known = {k: v for k, v in model.items() if k in ModelShape._fields}
  required = set(ModelShape._fields) - set(ModelShape._field_defaults)
  if not required <= set(known):
    return None
  shape = ModelShape(**known)
  heads = shape.n_heads if shape.kv_heads is None else shape.kv_heads
  return Decoder(
      shape.n_layers, shape.d_model, shape.d_ff, shape.n_heads,
      shape.vocab_size, shape.gated,
      keys=shape.attention_width * heads // shape.n_heads,
  )


def on_wafer(label: str, run: Run) -> str | None:
  """Estimates the time of a run on a modeled CS-2, sparse and dense.

  Args:
    label: Name of the run in the text.
    run: A run.

  Returns:
    A sentence; `None` for dense runs, those without recorded sizes, and those
    whose sparsity saves less than 2 % of the time.

  Example:
    >>> from spdf_jax.runs.read import PhaseRecord
    >>> sizes = dict(n_layers=24, d_model=2048, n_heads=16, d_ff=8192,
    ...              vocab_size=50257)
    >>> phase = PhaseRecord('p', 0, 4, 64, 2048, 'text', 0.75, 64, 5.0, 10.0)
    >>> print(on_wafer('toy', Run('toy', (phase,), (), model=sizes)))
    ... # doctest: +NORMALIZE_WHITESPACE
    On one modeled CS-2 (calibrated, not measured) toy would take 1.84 s and the
    same steps dense 3.3 s: 400 ms of either for the optimizer on the hosts,
    1.44 s against 2.9 s on the wafer.
  """
  decoder = decoder_of(run.model)
  parts = [(p, part) for p in run.phases for part in p.parts]
  if decoder is None or not any(part.sparsity for _, part in parts):
    return None
  device = create_device('cs2')
  found = {}

  def seconds(phase, sparsity):
    key = phase.batch_size, phase.length, sparsity
    if key not in found:
      zeros = min(sparsity, 1 - 1e-6)
      step = training_step(decoder, phase.batch_size, phase.length, zeros)
      found[key] = float(report_on(step, device).seconds)
    return found[key]

  sparse = sum(part.steps * seconds(p, part.sparsity) for p, part in parts)
  dense = sum(part.steps * seconds(p, 0.0) for p, part in parts)
  hosts = device.step_seconds * sum(part.steps for _, part in parts)
  if dense < _LEAST_SPEEDUP * sparse:
    return None
  return (
      f'On one modeled CS-2 (calibrated, not measured) {label} would '
      f'take {duration(sparse)} and the same steps dense {duration(dense)}: '
      f'{duration(hosts)} of either for the optimizer on the hosts, '
      f'{duration(sparse - hosts)} against {duration(dense - hosts)} on the '
      'wafer.'
  )
