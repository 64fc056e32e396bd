r"""Continues a prompt with a trained model, and writes tokens as they come.

  python -m experiments.generate --model=runs/a --prompt='Once upon a time'
  python -m experiments.generate --model=export/ --prompt=Once --dtype=bfloat16

The model is a run, or a Hugging Face directory with its tokenizer, also a
compact export of experiments.convert. Its sparse matrices are stored as lists
of their kept weights, so that pruned ones take neither memory nor time. The
prompt of a run that was fine-tuned on a task is one of its contexts, e.g.
"name : Blue Spice | food : French": the model answers it. The last line, on
the standard error, has the speed and the memory.
"""

from collections.abc import Iterator
import resource
import sys
import time

from absl import flags
import jax

from experiments.launch import compilation_cache
from experiments.launch import console
from experiments.scores import language_models
from spdf_jax import evaluation
from spdf_jax.accelerator import listed_matrix
from spdf_jax.data import special_tokens
from spdf_jax.evaluation.generation import Choose

FLAGS = flags.FlagValues()
_MODEL = flags.DEFINE_string(
    'model', None,
    'WORKDIR, WORKDIR@PHASE, WORKDIR@PHASE:best or a Hugging Face directory.',
    required=True, flag_values=FLAGS,
)
_TOKENIZER = flags.DEFINE_string(
    'tokenizer', None, "Path of a tokenizer; by default the model's own.",
    flag_values=FLAGS,
)
_PROMPT = flags.DEFINE_string(
    'prompt', '', 'Beginning of the text.', flag_values=FLAGS
)
_CONTEXT = flags.DEFINE_bool(
    'context', None,
    'Whether the prompt is the context of a task, which ends with an end of '
    'text; by default if the model is a run that ends with fine-tuning.',
    flag_values=FLAGS,
)
_MAX_NEW_TOKENS = flags.DEFINE_integer(
    'max_new_tokens', 64, 'Largest number of tokens to generate.',
    lower_bound=1, flag_values=FLAGS,
)
_DTYPE = flags.DEFINE_enum(
    'dtype', None, listed_matrix.DTYPES,
    'Dtype of the kept weights; by default as stored.',
    flag_values=FLAGS,
)
_TEMPERATURE = flags.DEFINE_float(
    'temperature', 0.0, 'Temperature of sampling; 0: greedy.', lower_bound=0,
    flag_values=FLAGS,
)
_TOP_K = flags.DEFINE_integer(
    'top_k', None, 'Tokens to sample from.', flag_values=FLAGS
)
_TOP_P = flags.DEFINE_float(
    'top_p', None, 'Probability to sample from.', flag_values=FLAGS
)
_SEED = flags.DEFINE_integer(
    'seed', 0, 'Seed of sampling.', lower_bound=0, upper_bound=2**63 - 1,
    flag_values=FLAGS,
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
  model = language_models.open_listed(
      _MODEL.value, dtype=_DTYPE.value, tokenizer=_TOKENIZER.value,
      least_sparsity=0.5,
  )
  _write_continuation(model, choose)


def _write_continuation(
    model: language_models.LanguageModel, choose: Choose
) -> None:
  """Writes the prompt and its continuation, and then the speed and memory.

  The tokens per second are without the first one, which includes compilation
  and the prompt.
  """
  tokenizer = model.tokenizer
  ids = special_tokens.begun(tokenizer, tokenizer.encode(_PROMPT.value))
  is_context = bool(model.task) if _CONTEXT.value is None else _CONTEXT.value
  if is_context:
    ids = [*ids, tokenizer.end_of_text]
  ids = ids or [special_tokens.begin_of(tokenizer)]
  times: list[float] = []

  def timed() -> Iterator[int]:
    for token in evaluation.stream(
        evaluation.CachedModel(model.module), model.params, ids,
        choose=choose, key=_SEED.value, max_new_tokens=_MAX_NEW_TOKENS.value,
        end_of_text=special_tokens.special_of(tokenizer).ends,
        length=model.module.config.max_length,
    ):
      times.append(time.perf_counter())
      yield token

  texts = evaluation.decode_stream(tokenizer, timed(), ids)
  first = next(texts, '')  # Bad input raises before anything is written.
  sys.stdout.write(_PROMPT.value + ('\n' if is_context else '') + first)
  for text in texts:
    sys.stdout.write(text)
    sys.stdout.flush()
  print(flush=True)
  number = len(times)
  seconds = times[-1] - times[0] if number > 1 else 0
  speed = f'{(number - 1) / seconds:.1f} tokens/s' if seconds else 'one step'
  stored = sum(x.nbytes for x in jax.tree.leaves(model.params))
  # Linux reports KiB.
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
  print(
      f'{number} tokens, {speed}; parameters {stored / 2**20:,.1f} MiB, peak '
      f'memory {peak / 2**20:,.0f} MiB', file=sys.stderr,
  )


if __name__ == '__main__':
  console.start(main, FLAGS)
