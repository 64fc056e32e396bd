"""Cost of the models: a dense training step of GPT-2 Small, and generation.

The step is that of training with a plan without sparsity, including `sparsify`.
It is compared with plain Flax and optax (`small_gpts.PlainGPT`) on two
sequences of 128 tokens. Target: at most 1.05 of the plain step's wall time.
Both start from the same parameters; their losses are compared too.

Tokens are generated with the cache, as `evaluation.generate` does, by four
layers of GPT-2 Small with a cache of 544 tokens. Targets: a token after the
512th takes at most 1.2 of the time of one after the 16th, and no part of the
cache is copied.
"""

from collections.abc import Iterator
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks import compiled
from experiments.benchmarks import measuring
from experiments.benchmarks import small_gpts
from spdf_jax import evaluation
from spdf_jax import models
from spdf_jax import training
from spdf_jax.training.step import optimizers

_LARGEST_STEP_RATIO = 1.05
_LARGEST_TOKEN_RATIO = 1.2
_LARGEST_DIFFERENCE = 1e-4
"""Largest difference between the losses of the two steps."""
_GPT2_SMALL = dict(
    n_heads=12, d_model=768, d_ff=3072, vocab_size=50257, max_length=1024
)
STEP = small_gpts.Case(
    'gpt2-small', _GPT2_SMALL | dict(n_layers=12), 2, 128, 1, 0
)
GENERATION = small_gpts.Case(
    '4 layers of gpt2-small', _GPT2_SMALL | dict(n_layers=4), 4, 544, 1, 0
)
_EARLY, _LATE = 16, 512
TOKENS = 16
"""Number of tokens generated in one call."""


def measure(repeats: int, rng: np.random.Generator) -> Iterator[measuring.Row]:
  """Measures the step, then generation.

  Args:
    repeats: Rounds of timing.
    rng: Random generator of tokens and the bootstrap.

  Yields:
    Rows.
  """
  yield from measure_step(STEP, repeats, rng)
  yield from measure_generation(GENERATION, repeats, rng)


def measure_step(
    case: small_gpts.Case, repeats: int, rng: np.random.Generator
) -> Iterator[measuring.Row]:
  """Measures a dense training step against a plain one."""
  programs = step_programs(case, rng)
  calls = [compiled.repeated(program) for program in programs.values()]
  timings = measuring.interleave(calls, repeats * case.steps, warmups=2)
  losses = [metrics['train/loss'] for _, metrics in timings.results]
  name = f'{case.name}, {case.batch_size} x {case.length} tokens'
  yield measuring.sampled_row(
      name, 'plain step, wall ms', 1e3 * timings.wall[0], rng
  )
  yield from measuring.ratio_rows(
      name, 'our step / plain', timings, (1, 0), rng,
      target=_LARGEST_STEP_RATIO,
  )
  yield measuring.counted_row(
      name,
      'difference of the last losses',
      abs(float(losses[0] - losses[1])),
      target=_LARGEST_DIFFERENCE,
  )


def step_programs(
    case: small_gpts.Case, rng: np.random.Generator
) -> dict[str, compiled.Program]:
  """Compiles both steps, from the same parameters."""
  subject = small_gpts.create_subject(case, rng)
  plan = training.Plan(tuple(
      dataclasses.replace(phase, algorithm={'name': 'dense'})
      for phase in subject.plan.phases
  ))
  ours = optimizers.adamw(
      plan, where=models.sparsifiable, key=jax.random.key(0),
      **subject.settings,
  )
  plain = small_gpts.plain_adamw(
      plan.learning_rate, plan.phases[0].weight_decay, **subject.settings
  )
  # The step donates its state, and the parameters are used again below.
  params = jax.tree.map(jnp.copy, subject.params)
  return {
      'plain': compiled.compile_program(
          functools.partial(
              small_gpts.plain_train_step,
              apply_fn=small_gpts.PlainGPT(subject.model.config).apply,
              optimizer=plain,
          ),
          (params, plain.init(params)),
          subject.batch,
      ),
      'ours': small_gpts.compile_step(subject._replace(plan=plan), ours),
  }


def measure_generation(
    case: small_gpts.Case, repeats: int, rng: np.random.Generator
) -> Iterator[measuring.Row]:
  """Measures generation early and late in a sequence that fills the cache."""
  programs = {
      first: generation_program(case, first, rng) for first in (_EARLY, _LATE)
  }
  calls = [compiled.repeated(program) for program in programs.values()]
  timings = measuring.interleave(calls, repeats * case.steps, warmups=2)
  name = f'{case.name}, {case.batch_size} sequences'
  early, late = timings.wall / TOKENS
  yield measuring.sampled_row(
      name, f'token {_EARLY}, wall ms', 1e3 * early, rng
  )
  yield from measuring.ratio_rows(
      name, f'token {_LATE} / token {_EARLY}', timings, (1, 0), rng,
      target=_LARGEST_TOKEN_RATIO,
  )
  for first, program in programs.items():
    cache, _ = program.state
    yield measuring.counted_row(
        name,
        f'token {first}: bytes of the cache copied',
        compiled.copied_bytes(program, cache),
        target=0,
    )


def generation_program(
    case: small_gpts.Case, first: int, rng: np.random.Generator
) -> compiled.Program:
  """Compiles the greedy continuation of sequences of `first` tokens."""
  model = models.create_model('gpt2-small', **case.model)
  decoder = evaluation.CachedModel(model)
  init = jax.jit(model.init)
  params = init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))['params']
  tokens_B = jnp.asarray(
      rng.integers(model.config.vocab_size, size=case.batch_size)
  )

  def extend(state: Any, params: Any) -> tuple[Any, tuple[()]]:
    def append(i, state):
      cache, last_B = state
      positions_B = jnp.full_like(last_B, first) + i
      logits_Bx1xV, cache = decoder(
          params, cache, last_B[:, None], positions_B[:, None]
      )
      return cache, jnp.argmax(logits_Bx1xV[:, 0], axis=-1)

    return jax.lax.fori_loop(0, TOKENS, append, state), ()

  cache = decoder.create_cache(case.batch_size, case.length)
  return compiled.compile_program(extend, (cache, tokens_B), params)
