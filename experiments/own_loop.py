"""A loop of one's own around a Flax GPT, to be copied and changed.

  python -m experiments.own_loop --folder=runs/own_loop
  python -m experiments.own_loop --folder=runs/books --text=book.txt --width=512

Trains a GPT on the bytes of a text, by default the sources of Python's standard
library: with zeros in its hidden matrices for two thirds of the steps, then
densely (Variable SPDF). The model and the loop know nothing of sparsity but
five lines, marked below. A checkpoint is saved every 50 steps, from which the
same command continues, bit for bit; loss.png shows the loss of every step.
"""

import json
import pathlib
import time
from typing import Any

from absl import flags
from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

from experiments.launch import console
import spdf_jax as spdf
from spdf_jax import extras
from spdf_jax import files
from spdf_jax.data import stdlib
from spdf_jax.runs import style

FLAGS = flags.FlagValues()
_FOLDER = flags.DEFINE_string(
    'folder', 'runs/own_loop', 'Folder for checkpoints and the plot.',
    flag_values=FLAGS,
)
_TEXT = flags.DEFINE_string(
    'text', None, "A text file; by default the standard library's sources.",
    flag_values=FLAGS,
)
_STEPS = flags.DEFINE_integer(
    'steps', 600, 'Steps, of 16 sequences of 128 bytes.', 3, flag_values=FLAGS
)
_SPARSITY = flags.DEFINE_float(
    'sparsity', 0.75, 'Share of zeros in the hidden matrices.', 0, 0.999,
    flag_values=FLAGS,
)
_WIDTH = flags.DEFINE_integer(
    'width', 256, 'Width of the model, a multiple of 64.', 64, flag_values=FLAGS
)
BATCH, LENGTH, LAYERS, EVERY = 16, 128, 4, 50


class GPT(nn.Module):
  """A GPT over bytes: tokens [B, L] to logits [B, L, 256]."""

  width: int

  @nn.compact
  def __call__(self, tokens_BxL: jax.Array) -> jax.Array:
    embed = nn.Embed(256, self.width, name='embed')
    positions = self.param(
        'positions', nn.initializers.normal(0.02), (LENGTH, self.width)
    )
    x_BxLxD = embed(tokens_BxL) + positions[:tokens_BxL.shape[1]]
    mask = nn.make_causal_mask(tokens_BxL)
    for _ in range(LAYERS):
      attention = nn.MultiHeadDotProductAttention(self.width // 64)
      x_BxLxD += attention(nn.LayerNorm()(x_BxLxD), mask=mask)
      h_BxLxF = nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x_BxLxD)))
      x_BxLxD += nn.Dense(self.width)(h_BxLxF)
    return embed.attend(nn.LayerNorm()(x_BxLxD))


def batch_at(text: np.ndarray, step: int) -> np.ndarray:
  """Returns the batch of a step, `[BATCH, LENGTH + 1]`: a pure function."""
  rng = np.random.default_rng(step)
  starts = rng.integers(len(text) - LENGTH, size=(BATCH, 1))
  return text[starts + np.arange(LENGTH + 1)].astype(np.int32)


def train(
    text: np.ndarray, folder: pathlib.Path, steps: int, sparsity: float,
    width: int,
) -> list[float]:
  """Trains from the last checkpoint on; returns the losses of these steps."""
  model = GPT(width)

  def loss_fn(params: Any, batch: jax.Array) -> jax.Array:
    logits = model.apply({'params': params}, batch[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(
        logits, batch[:, 1:]
    ).mean()

  algorithm = spdf.join(  # 1. The zeros over training.
      [spdf.static(sparsity), spdf.dense()], [2 * steps // 3]
  )
  rate = optax.warmup_cosine_decay_schedule(0, 2e-3, steps // 20, steps)
  tx = spdf.sparsify(  # 2. Wraps the optimizer.
      optax.adamw(rate, b2=0.95), algorithm, key=0, where=spdf.where.per_head
  )

  def init() -> dict[str, Any]:
    params = model.init(jax.random.key(0), batch_at(text, 0)[:, :-1])['params']
    opt_state = tx.init(params)
    # 3. Initial zeros.
    params = spdf.apply_mask(params, spdf.get_mask(opt_state))
    losses = jnp.zeros(steps)
    return {'params': params, 'opt_state': opt_state, 'losses': losses}

  @jax.jit
  def step(state: dict[str, Any], i: int, batch: jax.Array) -> dict[str, Any]:
    masks = spdf.get_masks(state['opt_state'])  # 4. Masks of this step.
    # 5. Faster on CPUs.
    loss, grads = jax.value_and_grad(spdf.skip_zeros(loss_fn))(
        state['params'], batch, **masks
    )
    updates, opt_state = tx.update(grads, state['opt_state'], state['params'])
    params = optax.apply_updates(state['params'], updates)
    losses = state['losses'].at[i].set(loss)
    return {'params': params, 'opt_state': opt_state, 'losses': losses}

  options = ocp.CheckpointManagerOptions(max_to_keep=2)
  with ocp.CheckpointManager(folder.absolute(), options=options) as manager:
    start = manager.latest_step() or 0
    state = jax.jit(init)()
    if start:
      print(f'continuing from step {start}')
      state = manager.restore(start, args=ocp.args.StandardRestore(state))
    began = time.perf_counter()
    for i in range(start, steps):
      state = step(state, i, batch_at(text, i))
      if (i + 1) % EVERY == 0 or i + 1 == steps:
        manager.save(i + 1, args=ocp.args.StandardSave(state))
        speed = (i + 1 - start) * BATCH * LENGTH / (time.perf_counter() - began)
        loss = state['losses'][i]
        print(f'step {i + 1}  loss {loss:.3f}  {speed:.0f} tokens/s')
        print(spdf.summarize(state['opt_state'], state['params']))
  return state['losses'].tolist()


def run() -> str:
  """Reads the text, trains and plots; returns what was written."""
  extras.require('matplotlib', 'quickstart')
  if _TEXT.value is None:
    read = '\n'.join(source for _, source in stdlib.module_sources()).encode()
  else:
    read = pathlib.Path(_TEXT.value).read_bytes()
  if len(read) <= LENGTH:
    raise ValueError(f'text has {len(read)} bytes; give more than {LENGTH}.')
  folder = pathlib.Path(_FOLDER.value)
  folder.mkdir(parents=True, exist_ok=True)
  given = {name: FLAGS[name].value for name in FLAGS if name != 'folder'}
  record = folder / 'flags.json'
  if record.exists() and json.loads(record.read_text()) != given:
    raise ValueError(
        f'{record} has other flags than {given}; give another --folder.'
    )
  files.write_atomically(record, json.dumps(given))
  losses = train(
      np.frombuffer(read, np.uint8), folder / 'checkpoints', _STEPS.value,
      _SPARSITY.value, _WIDTH.value,
  )
  figure = style.new_figure(6, 4)
  axes = figure.subplots()
  axes.plot(
      range(1, len(losses) + 1), losses, color=style.COLORS[0], linewidth=1.0
  )
  axes.axvline(2 * len(losses) // 3, color=style.GREY, linestyle='--')
  axes.set(xlabel='Step', ylabel='Training loss (nats per byte)',
           title=f'{_SPARSITY.value:.0%} zeros, from the dashed line on dense')
  style.polish(axes)
  style.save(figure, folder / 'loss.png')
  return f'{folder / "loss.png"} is written'


def main(argv: list[str]) -> int:
  """Runs the command; returns its exit status."""
  return console.run(argv, run)


if __name__ == '__main__':
  console.start(main, FLAGS)
