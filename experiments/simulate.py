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

from absl import app
from absl import flags

from experiments.launch import config_file
from experiments.launch import console
from spdf_jax.accelerator.wafer.device import BANDS
from spdf_jax.runs import wafer_report

_CONFIG = config_file.define()
_DEVICE = flags.DEFINE_string('device', 'cs2', 'Device: cs2 or cs3.')
_BAND = flags.DEFINE_enum(
    'band', 'default', list(BANDS), 'Assumed losses around multiply-adds.'
)
_SYSTEMS = flags.DEFINE_integer(
    'systems', 1, 'Number of systems in the cluster.', lower_bound=1
)
_MODE = flags.DEFINE_enum(
    'mode', 'train', wafer_report.MODES,
    'Program to simulate: training, a forward pass or decoding.',
)
_BATCH_SIZE = flags.DEFINE_integer(
    'batch_size', 1, 'Sequences per batch, in forward and decode.',
    lower_bound=1,
)
_FIGURE = flags.DEFINE_enum(
    'figure', None, wafer_report.FIGURES, 'Figure to draw to --out.'
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
  return console.run(
      argv, wafer_report.describe, _CONFIG.value, _DEVICE.value, _BAND.value,
      systems=_SYSTEMS.value, mode=_MODE.value, batch_size=_BATCH_SIZE.value,
      figure=_FIGURE.value, out=_OUT.value, trace=_TRACE.value,
      validate=_VALIDATE.value, variants=_VARIANTS.value,
      executed=_EXECUTED.value, audit=_AUDIT.value,
      sensitivities=_SENSITIVITIES.value,
      price=(_PRICE.value, _PRICE_SOURCE.value),
      carbon=(_CARBON.value, _CARBON_SOURCE.value),
  )


if __name__ == '__main__':
  console.start(main)
