r"""Simulates a config on a modeled wafer: days, energy and cost of its plan.

  python -m experiments.simulate --config=configs/quickstart.py --device=cs2 \
    --systems=4
  python -m experiments.simulate --figure=appendix_c --out=appendix_c.png
  python -m experiments.simulate --validate
  python -m experiments.simulate --executed

--mode=forward or decode simulates inference with the trained model instead. All
numbers are modeled, none is measured; --audit prints every constant with its
source, --validate the model's errors against published numbers, --executed its
errors against events that are counted on emulated cores. Cost needs
--price_per_hour and --price_source, carbon --carbon_per_kwh and
--carbon_source; there are no default values.
"""

from collections.abc import Iterator
from typing import Any

from absl import app
from absl import flags

from experiments.launch import config_file
from experiments.launch import console
from experiments.wafer import executions
from experiments.wafer import gpus
from experiments.wafer import plots
from experiments.wafer import report as texts
from experiments.wafer import run_costs
from experiments.wafer import sweeps
from experiments.wafer import validation
from experiments.wafer import variants
from experiments.wafer.report import Rate
from spdf_jax import training
from spdf_jax.accelerator import wafer
from spdf_jax.accelerator.wafer import device as devices
from spdf_jax.accelerator.wafer import views
from spdf_jax.runs import style

_CONFIG = config_file.define()
_DEVICE = flags.DEFINE_string('device', 'cs2', 'Device: cs2 or cs3.')
_BAND = flags.DEFINE_enum(
    'band', 'default', list(devices.BANDS),
    'Assumed losses around multiply-adds.',
)
_SYSTEMS = flags.DEFINE_integer(
    'systems', 1, 'Number of systems in the cluster.', lower_bound=1
)
_MODE = flags.DEFINE_enum(
    'mode', 'train', ['train', 'forward', 'decode'],
    'Program to simulate: training, a forward pass or decoding.',
)
_BATCH_SIZE = flags.DEFINE_integer(
    'batch_size', 1, 'Sequences per batch, in forward and decode.',
    lower_bound=1,
)
_FIGURE = flags.DEFINE_enum(
    'figure', None, ['appendix_c', 'roofline'], 'Figure to draw to --out.'
)
_OUT = flags.DEFINE_string('out', None, 'File for the figure.')
_TRACE = flags.DEFINE_string('trace', None, 'File for a Perfetto trace.')
_VALIDATE = flags.DEFINE_bool(
    'validate', False, 'Print modeled beside published numbers.'
)
_VARIANTS = flags.DEFINE_string(
    'variants', None, 'Variant that may explain an error: its name, or all.'
)
_EXECUTED = flags.DEFINE_bool(
    'executed', False, 'Run a small GPT on emulated cores; compare its costs.'
)
_AUDIT = flags.DEFINE_bool('audit', False, 'Print every constant.')
_SENSITIVITIES = flags.DEFINE_bool(
    'sensitivities', False,
    "Print how the time depends on each of the device's numbers.",
)
_PRICE = flags.DEFINE_float('price_per_hour', None, 'Price of one system.')
_PRICE_SOURCE = flags.DEFINE_string('price_source', '', 'Source of the price.')
_CARBON = flags.DEFINE_float('carbon_per_kwh', None, 'kg of CO2 per kWh.')
_CARBON_SOURCE = flags.DEFINE_string(
    'carbon_source', '', 'Source of --carbon_per_kwh.'
)
_NEEDED = _CONFIG, _FIGURE, _VALIDATE, _VARIANTS, _EXECUTED, _AUDIT


def main(argv: list[str]) -> int:
  """Runs the command; returns its exit status."""
  if not any(flag.value for flag in _NEEDED):
    raise app.UsageError(
        'give --config, --figure, --validate, --variants, --executed or '
        '--audit.'
    )
  if not _CONFIG.value and (
      _FIGURE.value == 'roofline' or _TRACE.value or _SENSITIVITIES.value
  ):
    raise app.UsageError(
        '--figure=roofline, --trace and --sensitivities need --config.'
    )
  mode = _MODE.value
  for flag in [_BATCH_SIZE] if mode == 'train' else [_PRICE, _CARBON]:
    if flag.present:
      raise app.UsageError(
          f'--{flag.name} has no effect with --mode={mode}; leave it out.'
      )
  return console.run(argv, _describe)


def _describe() -> Iterator[str]:
  """Yields the texts that the flags select, and the paths of written files."""
  device = wafer.create_device(_DEVICE.value, _BAND.value)
  if _AUDIT.value:
    yield device.audit()
  if _VALIDATE.value:
    yield validation.validation_table()
  if _VARIANTS.value:
    yield variants.variants_table(_VARIANTS.value)
  if _EXECUTED.value:
    yield from executions.describe_executions(_BAND.value)
  if _FIGURE.value == 'appendix_c':
    yield _save(plots.plot_appendix_c(_DEVICE.value))
  if _CONFIG.value:
    yield from _describe_config(device)


def _describe_config(device: wafer.WaferDevice) -> Iterator[str]:
  """Yields the cost of a config on a device, and the paths of files."""
  price = Rate.checked('price_per_hour', _PRICE.value, _PRICE_SOURCE.value)
  carbon = Rate.checked('carbon_per_kwh', _CARBON.value, _CARBON_SOURCE.value)
  run = training.Run.create(_CONFIG.value, planning=True)
  systems, decode = _SYSTEMS.value, _MODE.value == 'decode'
  if _MODE.value == 'train':
    estimate = run_costs.simulate_run(run, device, systems)
    report = estimate.report
    yield texts.format_estimate(estimate, run, price=price, carbon=carbon)
    yield f'\nfirst step: {gpus.comparison_table(report.program)}'
  else:
    inferences = run_costs.simulate_inference(
        run, device, systems, batch_size=_BATCH_SIZE.value,
        length=run.plan.phases[0].length, decode=decode,
    )
    report = inferences[0].report
    yield texts.format_inference(inferences, decode=decode)
  yield '\n' + views.format_report(report)
  if _SENSITIVITIES.value:
    effects = sweeps.sensitivities(report.program, device, systems=systems)
    yield '\n' + sweeps.sensitivity_table(effects)
  if _TRACE.value:
    path = views.write_trace(report, _TRACE.value)
    yield f'{path} is written: ui.perfetto.dev'
  if _FIGURE.value == 'roofline':
    yield _save(plots.plot_roofline(report))


def _save(figure: Any) -> str:
  path = _OUT.value or f'{_FIGURE.value}.png'
  style.save(figure, path)
  return f'{path} is written'


if __name__ == '__main__':
  console.start(main)
