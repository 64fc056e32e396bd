"""What a finished run would have taken on the modeled wafer, in a sentence."""

from collections.abc import Mapping
from typing import Any

from spdf_jax.accelerator.wafer import create_device
from spdf_jax.accelerator.wafer import report_on
from spdf_jax.accelerator.wafer.closed_form import Decoder
from spdf_jax.accelerator.wafer.closed_form import training_step
from spdf_jax.costs.flops import ModelShape
from spdf_jax.costs.simulation_text import duration
from spdf_jax.runs.workdirs import Run


def decoder_of(model: Mapping[str, Any]) -> Decoder | None:
  """Returns the sizes of a run's model, `None` where they are not recorded.

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
  """States what a sparse run takes on a modeled CS-2, and the same dense.

  Args:
    label: What the run is called.
    run: A run.

  Returns:
    A sentence or two; `None` for dense runs and those without recorded sizes.

  Example:
    >>> from spdf_jax.runs.workdirs import PhaseRecord
    >>> sizes = dict(n_layers=2, d_model=64, n_heads=2, d_ff=256, vocab_size=99)
    >>> phase = PhaseRecord('p', 0, 4, 2, 8, 'text', 0.75, 64, 5.0, 10.0)
    >>> print(on_wafer('toy', Run('toy', (phase,), (), model=sizes)))
    ... # doctest: +NORMALIZE_WHITESPACE
    On one modeled CS-2 (our calibration, nothing measured) toy would take
    403 ms and the same steps dense 403 ms: 400 ms of either at the optimizer's
    hosts, 3.26 ms against 3.32 ms on the wafer.
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
  return (
      f'On one modeled CS-2 (our calibration, nothing measured) {label} would '
      f'take {duration(sparse)} and the same steps dense {duration(dense)}: '
      f'{duration(hosts)} of either at the optimizer\'s hosts, '
      f'{duration(sparse - hosts)} against {duration(dense - hosts)} on the '
      'wafer.'
  )
