"""Whole steps of models of others, dense over `skip_zeros`.

The models are those of `other_gpts`, unchanged, and our own GPT of the same
sizes with its masks. A step is the loss, its gradients and AdamW. Targets: at
least 2.0 at 75 % in float32 at width 512, and nowhere below 0.97.
"""

from collections.abc import Callable, Iterator, Sequence
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.benchmarks import compiled
from experiments.benchmarks import machine
from experiments.benchmarks import measuring
from experiments.benchmarks import other_gpts
import spdf_jax as spdf
from spdf_jax import models
from spdf_jax.accelerator import auto

WIDTHS = 128, 256, 512, 768
SPARSITIES = 0.5, 0.75, 0.9
LEAST = 0.97
SPEEDUPS = {(512, 'float32', 0.75): 2.0}
"""Targets above `LEAST`, by width, dtype and sparsity."""
OURS = 'our GPT'
DENSE = 'dense step, milliseconds'


def measure(repeats: int, rng: np.random.Generator) -> Iterator[measuring.Row]:
  """Measures all models at all widths, on 4 x 256 tokens."""
  for width, dtype in itertools.product(WIDTHS, machine.dtypes()):
    sizes = other_gpts.Sizes(width, dtype)
    for name in (*other_gpts.GPTS, OURS):
      yield from measure_model(name, sizes, (4, 256), repeats, rng)


def measure_model(
    name: str,
    sizes: other_gpts.Sizes,
    shape: tuple[int, int],
    repeats: int,
    rng: np.random.Generator,
) -> Iterator[measuring.Row]:
  """Measures one model at all sparsities.

  Args:
    name: A key of `other_gpts.GPTS`, or `OURS`.
    sizes: Sizes of the model.
    shape: Shape of the batch: sequences, tokens.
    repeats: Rounds of timing.
    rng: Random generator of tokens and the bootstrap.

  Yields:
    Rows.
  """
  tokens = rng.integers(sizes.vocabulary, size=shape, dtype=np.int32)
  params, dense, sparse = (
      _ours(sizes, shape[1]) if name == OURS else _of_others(name, sizes)
  )
  optimizers = [optax.adamw(1e-3)] + [
      spdf.sparsify(
          optax.adamw(1e-3), spdf.static(sparsity), where=hidden_matrices, key=0
      ) for sparsity in SPARSITIES
  ]
  programs = [
      _compile(dense if i == 0 else sparse, tx, params, tokens)
      for i, tx in enumerate(optimizers)
  ]
  timings = measuring.interleave(
      [compiled.repeated(program) for program in programs], repeats, warmups=2
  )
  case = f'{name}, d_model {sizes.width}, {sizes.dtype}'
  yield measuring.sampled_row(case, DENSE, 1000 * timings.wall[0], rng)
  for i, sparsity in enumerate(SPARSITIES, start=1):
    key = sizes.width, sizes.dtype, sparsity
    yield measuring.sampled_row(
        case,
        f'{sparsity:.0%} zeros: dense step / skip_zeros, wall',
        timings.wall[0] / timings.wall[i], rng,
        target=SPEEDUPS.get(key, LEAST), at_most=False,
    )


def measure_loop(
    repeats: int,
    rng: np.random.Generator,
    sizes: Sequence[int] = (256, 512, 1024),
) -> Iterator[measuring.Row]:
  """Measures steps of README's first loop, at 75 % zeros.

  Args:
    repeats: Rounds of timing.
    rng: Random generator of the bootstrap.
    sizes: Widths of the examples; README's is 256. The hidden layer is four
      times as wide, and there are 1,024 examples.

  Yields:
    Two rows for each width: dense time, and dense over sparse time.
  """
  def loss(params, batch):
    x, y = batch
    predicted = jnp.tanh(x @ params['wi']) @ params['wo']
    return jnp.mean((predicted - y) ** 2)

  for width in sizes:
    x, y, wi = (
        jax.random.normal(jax.random.key(i), shape, 'float32')
        for i, shape in enumerate([(1024, width)] * 2 + [(width, 4 * width)])
    )
    params = {'wi': wi / 16, 'wo': jnp.zeros((4 * width, width), 'float32')}
    adam = optax.adam(3e-3, b2=0.95)
    programs = [
        _compile(loss, adam, params, (x, y)),
        _compile(
            spdf.skip_zeros(loss),
            spdf.sparsify(adam, spdf.static(0.75), key=0), params, (x, y),
        ),
    ]
    wall = measuring.interleave(
        [compiled.repeated(program) for program in programs], repeats, warmups=2
    ).wall
    case = f'width {width}'
    yield measuring.sampled_row(case, DENSE, 1000 * wall[0], rng)
    yield measuring.sampled_row(
        case, '75% zeros: dense step / skip_zeros, wall', wall[0] / wall[1],
        rng, target=LEAST, at_most=False,
    )


def hidden_matrices(path: str, leaf: Any) -> Any:
  """Selects the hidden matrices of all models."""
  names = path.split('/')
  if leaf.ndim < 2 or {'bias', 'embed', 'embedding'} & {*names}:
    return False
  if names[0] == 'blocks':
    return spdf.where.stacked(spdf.where.per_head)(path, leaf)
  if names[-1] == 'weight':  # Equinox has outputs first.
    return spdf.MatrixAxes(1, 0)
  if names[-1] == 'kernel':
    return spdf.where.per_head(path, leaf)
  return spdf.MatrixAxes(0, 1)


Loss = Callable[..., jax.Array]


def _of_others(
    name: str, sizes: other_gpts.Sizes
) -> tuple[Any, Loss, Loss]:
  params, logits = other_gpts.GPTS[name](sizes)
  loss = functools.partial(_loss, logits)
  return params, loss, spdf.skip_zeros(loss)


def _ours(
    sizes: other_gpts.Sizes, length: int
) -> tuple[Any, Loss, Loss]:
  model = models.create_model(
      'gpt-mini', n_layers=sizes.layers, n_heads=sizes.heads,
      d_model=sizes.width, d_ff=4 * sizes.width, max_length=length,
      vocab_size=sizes.vocabulary, dtype=sizes.dtype,
  )
  params = jax.jit(model.init)(
      jax.random.key(0), jnp.zeros((1, 2), jnp.int32)
  )['params']
  apply = model.with_lowering(auto.AUTO).apply

  def sparse(params, tokens, *, mask, grad_mask):
    masks = {'masks': mask, 'grad_masks': grad_mask}
    logits = lambda params, x: apply({'params': params, **masks}, x)
    return _loss(logits, params, tokens)

  dense = lambda params, x: model.apply({'params': params}, x)
  return params, functools.partial(_loss, dense), sparse


def _loss(logits: Any, params: Any, tokens: jax.Array) -> jax.Array:
  logits_BxLxV = logits(params, tokens)[:, :-1].astype(jnp.float32)
  return optax.softmax_cross_entropy_with_integer_labels(
      logits_BxLxV, tokens[:, 1:]
  ).mean()


def _compile(
    loss: Loss, optimizer: Any, params: Any, batch: Any
) -> compiled.Program:
  # The step donates the state, and the parameters are used again.
  params = jax.tree.map(jnp.copy, params)
  opt_state = optimizer.init(params)
  is_sparse = isinstance(opt_state, spdf.SparsifyState)
  if is_sparse:
    params = spdf.apply_mask(params, spdf.get_mask(opt_state))

  def step(state, batch):
    params, opt_state = state
    masks = spdf.get_masks(opt_state) if is_sparse else {}
    value, grads = jax.value_and_grad(loss)(params, batch, **masks)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), value

  return compiled.compile_program(step, (params, opt_state), batch)
