r"""Continues a prompt with a trained model, and writes tokens as they come.

  python -m experiments.generate --model=runs/a --prompt='Once upon a time'
  python -m experiments.generate --model=export/ --prompt=Once --dtype=bfloat16

The model is a run, or a Hugging Face directory with its tokenizer, also a
compact export of experiments.convert. Its sparse matrices are stored as lists
of their kept weights, so that pruned ones take neither memory nor time. The
last line, on the standard error, has the speed and the memory.
"""

from absl import flags

from experiments.launch import compilation_cache
from experiments.launch import console
from spdf_jax import evaluation
from spdf_jax.accelerator.listing import DTYPES
from spdf_jax.runs.continuation import write_continuation
from spdf_jax.runs.open_models import open_listed

_MODEL = flags.DEFINE_string(
    'model', None,
    'WORKDIR, WORKDIR@PHASE, WORKDIR@PHASE:best or a Hugging Face directory.',
)
_TOKENIZER = flags.DEFINE_string(
    'tokenizer', None, "Path of a tokenizer; by default the model's own."
)
_PROMPT = flags.DEFINE_string('prompt', '', 'Beginning of the text.')
_MAX_NEW_TOKENS = flags.DEFINE_integer(
    'max_new_tokens', 64, 'Largest number of tokens to generate.',
    lower_bound=1,
)
_DTYPE = flags.DEFINE_enum(
    'dtype', None, DTYPES, 'Dtype of the kept weights; by default as stored.'
)
_TEMPERATURE = flags.DEFINE_float(
    'temperature', 0.0, 'Temperature of sampling; 0: greedy.', lower_bound=0
)
_TOP_K = flags.DEFINE_integer('top_k', None, 'Tokens to sample from.')
_TOP_P = flags.DEFINE_float('top_p', None, 'Probability to sample from.')
_SEED = flags.DEFINE_integer(
    'seed', 0, 'Seed of sampling.', lower_bound=0, upper_bound=2**63 - 1
)


def main(argv: list[str]) -> int:
  """Runs the command; returns its exit status."""
  return console.run(argv, _generate)


def _generate() -> None:
  compilation_cache.prepare()
  sampling = _TOP_K.value, _TOP_P.value
  if _TEMPERATURE.value:
    choose = evaluation.sampler(_TEMPERATURE.value, *sampling)
  elif any(value is not None for value in sampling):
    raise ValueError(
        '--top_k and --top_p need sampling, and --temperature is 0; give a '
        'temperature above 0.'
    )
  else:
    choose = evaluation.greedy
  write_continuation(
      open_listed(
          _MODEL.value, dtype=_DTYPE.value, tokenizer=_TOKENIZER.value,
          least_sparsity=0.5,
      ),
      _PROMPT.value, max_new_tokens=_MAX_NEW_TOKENS.value, choose=choose,
      seed=_SEED.value,
  )


if __name__ == '__main__':
  flags.mark_flag_as_required('model')
  console.start(main)
