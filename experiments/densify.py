r"""Makes a sparse checkpoint dense: --checkpoint=WORKDIR@PHASE --to=WORKDIR.

  python -m experiments.densify --checkpoint=runs/a@pretrain --to=runs/b

Removes the mask of a checkpoint at the end of a phase and keeps weights, step,
schedules and the optimizer's moments, which --moments=reset initializes anew.
The config that continues from it has the same phases and a dense one after
them, which the first launch need not have had:

  python -m experiments.train --config=configs/quickstart.py --workdir=a \
    --config.phases.order="('pretrain',)"
  python -m experiments.densify --checkpoint=a --to=b
  python -m experiments.train --config=configs/quickstart.py --workdir=c \
    --config.resume=b --config.phases.order="('pretrain', 'finetune')"

The result equals that of one launch of all phases whose `reset_moments` agrees
with --moments. A phase with the learning rate 'continue' changes the schedule
of the phase before it, so it must have been part of the first launch.
"""

from absl import flags

from experiments.launch import console
from spdf_jax.training.checkpoints import densified

FLAGS = flags.FlagValues()
_CHECKPOINT = flags.DEFINE_string(
    'checkpoint', None, 'WORKDIR or WORKDIR@PHASE of a sparse run.',
    required=True, flag_values=FLAGS,
)
_TO = flags.DEFINE_string(
    'to', None, 'Workdir to write.', required=True, flag_values=FLAGS
)
_MOMENTS = flags.DEFINE_enum(
    'moments', 'keep', densified.MOMENTS, "The optimizer's moments.",
    flag_values=FLAGS,
)
_TRUST_CODE = flags.DEFINE_bool(
    'trust_code', False,
    'Run a user-defined algorithm that the checkpoint names.',
    flag_values=FLAGS,
)


def main(argv: list[str]) -> int:
  """Runs the command; returns its exit status."""
  return console.run(argv, _densify)


def _densify() -> str:
  written = densified.densify_checkpoint(
      _CHECKPOINT.value, _TO.value, moments=_MOMENTS.value,
      trust_code=_TRUST_CODE.value,
  )
  return f'{written} is written: dense, with moments: {_MOMENTS.value}'


if __name__ == '__main__':
  console.start(main, FLAGS)
