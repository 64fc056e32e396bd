"""Simulates a config on the modeled wafer: days, energy and cost of its plan.

  python -m experiments.simulate --config=configs/quickstart.py --device=cs2 \
    --systems=4
  python -m experiments.simulate --figure=appendix_c --out=appendix_c.png
  python -m experiments.simulate --validate

--mode=forward or decode simulates the trained model instead. Everything is
modeled, nothing measured; --audit prints every constant with its source,
--validate the model's errors. Cost needs --price_per_hour and --price_source,
carbon --carbon_per_kwh and --carbon_source: none is assumed.
"""

from absl import app
from absl import flags
from absl import logging
from ml_collections import config_flags

from experiments.launch import console
from spdf_jax import training
from spdf_jax.accelerator.wafer import create_device
from spdf_jax.accelerator.wafer.comparisons import comparison_table
from spdf_jax.accelerator.wafer.device import BANDS
from spdf_jax.accelerator.wafer.validation import validation_table
from spdf_jax.accelerator.wafer.views import format_report
from spdf_jax.accelerator.wafer.views import sensitivity_table
from spdf_jax.accelerator.wafer.views import write_trace
from spdf_jax.accelerator.wafer.what_if import sensitivities
from spdf_jax.costs.simulation import simulate_inference
from spdf_jax.costs.simulation import simulate_recipe
from spdf_jax.costs.simulation_text import format_estimate
from spdf_jax.costs.simulation_text import format_inference
from spdf_jax.costs.simulation_text import Rate
from spdf_jax.runs.wafer_plots import plot_appendix_c
from spdf_jax.runs.wafer_plots import plot_roofline

_CONFIG = config_flags.DEFINE_config_file(
    'config', None, 'Config file, with its argument: path.py:argument.'
)
_DEVICE = flags.DEFINE_string('device', 'cs2', 'cs2 or cs3.')
_BAND = flags.DEFINE_enum(
    'band', 'default', list(BANDS), 'What is lost around multiply-adds.'
)
_SYSTEMS = flags.DEFINE_integer('systems', 1, 'Systems of the cluster.')
_MODE = flags.DEFINE_enum(
    'mode', 'train', ['train', 'forward', 'decode'], 'What is simulated.'
)
_BATCH_SIZE = flags.DEFINE_integer(
    'batch_size', 1, 'Sequences, for forward and decode.'
)
_FIGURE = flags.DEFINE_enum(
    'figure', None, ['appendix_c', 'roofline'], 'Draw a figure to --out.'
)
_OUT = flags.DEFINE_string('out', None, 'Where the figure goes.')
_TRACE = flags.DEFINE_string('trace', None, 'Where a Perfetto trace goes.')
_VALIDATE = flags.DEFINE_bool(
    'validate', False, 'Print the model against printed numbers.'
)
_AUDIT = flags.DEFINE_bool('audit', False, 'Print every constant.')
_SENSITIVITIES = flags.DEFINE_bool(
    'sensitivities', False, 'Print what each number of the device is worth.'
)
_PRICE = flags.DEFINE_float('price_per_hour', None, 'Of one system.')
_PRICE_SOURCE = flags.DEFINE_string('price_source', '', 'Who says so.')
_CARBON = flags.DEFINE_float('carbon_per_kwh', None, 'kg of CO2.')
_CARBON_SOURCE = flags.DEFINE_string('carbon_source', '', 'Who says so.')


def main(argv: list[str]) -> int:
  """Runs the command; returns its exit status."""
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments: {argv[1:]}')
  if not (_CONFIG.value or _VALIDATE.value or _AUDIT.value or _FIGURE.value):
    raise app.UsageError('give --config, --figure, --validate or --audit.')
  console.prepare()
  try:
    _run()
  except (ValueError, OSError, ImportError) as error:
    logging.error('%s', error)
    return 1
  return 0


def _run() -> None:
  device = create_device(_DEVICE.value, _BAND.value)
  if _AUDIT.value:
    print(device.audit())
  if _VALIDATE.value:
    print(validation_table())
  if _FIGURE.value == 'appendix_c':
    _save(plot_appendix_c(_DEVICE.value))
  if not _CONFIG.value:
    return
  price = Rate.checked('price_per_hour', _PRICE.value, _PRICE_SOURCE.value)
  carbon = Rate.checked('carbon_per_kwh', _CARBON.value, _CARBON_SOURCE.value)
  recipe = training.create_recipe(_CONFIG.value, planning=True)
  if _MODE.value == 'train':
    estimate = simulate_recipe(recipe, device, _SYSTEMS.value)
    print(format_estimate(estimate, recipe, price=price, carbon=carbon))
    report = estimate.report
    print('\nthe first step, ' + comparison_table(report.program))
  else:
    found = simulate_inference(
        recipe, device, _SYSTEMS.value, batch_size=_BATCH_SIZE.value,
        length=recipe.plan.phases[0].length, decode=_MODE.value == 'decode',
    )
    print(format_inference(found, decode=_MODE.value == 'decode'))
    report = found[0].report
  print('\n' + format_report(report))
  if _SENSITIVITIES.value:
    found = sensitivities(report.program, device, systems=_SYSTEMS.value)
    print('\n' + sensitivity_table(found))
  if _TRACE.value:
    print(f'{write_trace(report, _TRACE.value)} is written: ui.perfetto.dev')
  if _FIGURE.value == 'roofline':
    _save(plot_roofline(report))


def _save(figure) -> None:
  path = _OUT.value or f'{_FIGURE.value}.png'
  figure.savefig(path)
  print(f'{path} is written')


if __name__ == '__main__':
  app.run(main)
