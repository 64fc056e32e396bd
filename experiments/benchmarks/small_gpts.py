"""Small GPTs for measurements: sparse, dense by optax alone, and plain Flax."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from configs import quickstart
from experiments.benchmarks import compiled
from experiments.benchmarks import measuring
import spdf_jax as spdf
from spdf_jax import data
from spdf_jax import models
from spdf_jax import training
from spdf_jax.sparsity import structures
from spdf_jax.training.configs.config import parse
from spdf_jax.training.configs.phases import Phase
from spdf_jax.training.step import losses
from spdf_jax.training.step import matmul
from spdf_jax.training.step import optimizers
from spdf_jax.training.step import storage

SPARSITY = 0.75
_TOKENS_PER_EPOCH = 2**24
"""Tokens of an epoch, which determine the lengths of phases, not their cost."""
_LARGEST_UNALIASED = 64
"""Largest number of bytes not updated in place: those of flags and counters."""
_LARGEST_COPIED = 0.01
"""Largest share of the optimizer's state that is copied: its counters."""

PyTree = Any


class Case(NamedTuple):
  """A model and a batch to measure."""

  name: str
  """Name of the case in rows."""

  model: Mapping[str, Any]
  """Fields of the quickstart's model to change."""

  batch_size: int
  """Sequences per step."""

  length: int
  """Tokens per sequence."""

  steps: int
  """Timed steps per repeat."""

  updates: int
  """Timed updates of the optimizer alone per repeat."""


CASES = (
    Case('quickstart', {}, 8, 128, 5, 20),
    # Close to the 4.3M parameters at which other libraries were measured.
    Case(
        'd_model 256',
        dict(n_layers=4, n_heads=8, d_model=256, d_ff=1024, max_length=256),
        4, 256, 2, 20,
    ),
    # Wide enough that matrix products take most of the step. The optimizer
    # alone is limited by memory bandwidth here, and masking the gradient for
    # the clipping norm is an extra pass: some 1.27, above the target of 1.25.
    Case(
        'd_model 512',
        dict(n_layers=4, n_heads=8, d_model=512, d_ff=2048, max_length=256),
        4, 256, 1, 10,
    ),
)


class Subject(NamedTuple):
  """A model that is ready to be trained."""

  model: nn.Module
  """The Flax module."""

  params: PyTree
  """Initial parameters."""

  plan: training.Plan
  """The phases of configs/quickstart.py."""

  settings: Mapping[str, Any]
  """Arguments of AdamW."""

  batch: data.Batch
  """Batch of every training step."""


def create_subject(case: Case, rng: np.random.Generator) -> Subject:
  """Creates the model of a case with random parameters and tokens."""
  config = parse(quickstart.get_config(f'sparsity={SPARSITY}'))
  model = models.model_of(
      dataclasses.replace(config.model.sizes, **case.model)
  )
  key = jax.random.key(config.seed)
  params = jax.jit(model.init)(key, jnp.zeros((1, 2), jnp.int32))['params']
  return Subject(
      model,
      params,
      _create_plan(config.phases, params),
      dataclasses.asdict(config.optimizer),
      _random_batch(case, model.config.vocab_size, rng),
  )


def random_grads(params: PyTree, rng: np.random.Generator) -> PyTree:
  """Returns gradients for steps of the optimizer alone."""
  return jax.tree.map(
      lambda p: 0.01 * rng.standard_normal(p.shape, np.float32), params
  )


def _create_plan(
    phases: Sequence[Phase], params: PyTree
) -> training.Plan:
  tokens = lambda length: _TOKENS_PER_EPOCH
  return training.create_plan(
      phases,
      tokens_per_epoch={'corpus': tokens, 'task': tokens},
      parameters=sum(x.size for x in jax.tree.leaves(params)),
  )


def _random_batch(
    case: Case, vocab_size: int, rng: np.random.Generator
) -> data.Batch:
  shape = (case.batch_size, case.length + 1)
  tokens = jnp.asarray(rng.integers(vocab_size, size=shape, dtype=np.int32))
  weights = jnp.ones((case.batch_size, case.length))
  return data.Batch(tokens[:, :-1], tokens[:, 1:], weights)


class PlainGPT(nn.Module):
  """GPT-2 as a user of Flax writes it: the baseline of `spdf_jax.models`.

  Layers have the same names, so both take the same parameters.
  """

  config: models.GPTConfig

  @nn.compact
  def __call__(self, tokens_BxL: jax.Array) -> jax.Array:
    c = self.config
    wte = nn.Embed(c.vocab_size, c.d_model, name='wte')
    wpe = nn.Embed(c.max_length, c.d_model, name='wpe')
    x_BxLxD = wte(tokens_BxL) + wpe(jnp.arange(tokens_BxL.shape[1]))
    for i in range(c.n_layers):
      x_BxLxD = _Layer(c, name=f'h_{i}')(x_BxLxD)
    return wte.attend(nn.LayerNorm(epsilon=1e-5, name='ln_f')(x_BxLxD))


class _Layer(nn.Module):
  config: models.GPTConfig

  @nn.compact
  def __call__(self, x_BxLxD: jax.Array) -> jax.Array:
    norm = lambda name: nn.LayerNorm(epsilon=1e-5, name=name)
    x_BxLxD += _Attention(self.config, name='attn')(norm('ln_1')(x_BxLxD))
    return x_BxLxD + _MLP(self.config, name='mlp')(norm('ln_2')(x_BxLxD))


class _Attention(nn.Module):
  config: models.GPTConfig

  @nn.compact
  def __call__(self, x_BxLxD: jax.Array) -> jax.Array:
    c = self.config
    heads = (*x_BxLxD.shape[:2], c.n_heads, c.d_model // c.n_heads)
    q_BxLxHxK, k_BxLxHxK, v_BxLxHxK = (
        nn.Dense(c.d_model, name=name)(x_BxLxD).reshape(heads)
        for name in ('wq', 'wk', 'wv')
    )
    y_BxLxHxK = jax.nn.dot_product_attention(
        q_BxLxHxK, k_BxLxHxK, v_BxLxHxK, is_causal=True
    )
    return nn.Dense(c.d_model, name='wd')(y_BxLxHxK.reshape(x_BxLxD.shape))


class _MLP(nn.Module):
  config: models.GPTConfig

  @nn.compact
  def __call__(self, x_BxLxD: jax.Array) -> jax.Array:
    h_BxLxF = nn.gelu(nn.Dense(self.config.d_ff, name='wi')(x_BxLxD))
    return nn.Dense(self.config.d_model, name='wo')(h_BxLxF)


def plain_adamw(
    learning_rate: optax.Schedule,
    weight_decay: float,
    *,
    b1: float,
    b2: float,
    eps: float,
    clip_norm: float,
) -> optax.GradientTransformation:
  """Returns AdamW for a plain GPT; biases and norms have no weight decay."""
  decays = lambda params: jax.tree_util.tree_map_with_path(
      lambda path, _: path[-1].key not in ('bias', 'scale'), params
  )
  return optax.chain(
      optax.clip_by_global_norm(clip_norm),
      optax.adamw(
          learning_rate, b1, b2, eps, weight_decay=weight_decay, mask=decays
      ),
  )


def plain_train_step(
    state: tuple[PyTree, PyTree],
    batch: Any,
    *,
    apply_fn: Callable[..., jax.Array],
    optimizer: optax.GradientTransformation,
) -> tuple[tuple[PyTree, PyTree], dict[str, jax.Array]]:
  """Takes a step of a plain GPT on a state of parameters and Adam's state."""
  params, opt_state = state

  def loss_fn(params):
    logits_BxLxV = apply_fn({'params': params}, batch.inputs)
    losses_BxL = optax.softmax_cross_entropy_with_integer_labels(
        logits_BxLxV, batch.targets
    )
    return (losses_BxL * batch.weights).sum() / batch.weights.sum()

  loss, grads = jax.value_and_grad(loss_fn)(params)
  updates, opt_state = optimizer.update(grads, opt_state, params)
  return (optax.apply_updates(params, updates), opt_state), {
      'train/loss': loss, 'train/grad_norm': optax.tree.norm(grads)
  }


def dense_adamw(
    plan: training.Plan,
    *,
    b1: float,
    b2: float,
    eps: float,
    clip_norm: float,
    wrap: Callable[
        [optax.GradientTransformation], optax.GradientTransformation
    ] = lambda adam: adam,
) -> optax.GradientTransformation:
  """Returns AdamW with a plan's schedules; `wrap` changes its Adam."""
  return optax.chain(
      optax.clip_by_global_norm(clip_norm),
      wrap(optax.scale_by_adam(b1, b2, eps)),
      optax.add_decayed_weights(plan.weight_decay, mask=optimizers.matrices),
      optax.scale_by_learning_rate(plan.learning_rate),
  )


def dense_train_step(
    state, batch, *, apply_fn, optimizer, learning_rate,
    loss=losses.CROSS_ENTROPY
):
  """Takes a training step without masks, as a user of optax writes it.

  Loss, metrics and schedules are those of `spdf_jax.training`.
  """

  def loss_fn(params):
    sums = loss(apply_fn, {'params': params}, batch)
    return sums.objective / losses.number_of_tokens(batch.weights)

  value, grads = jax.value_and_grad(loss_fn)(state.params)
  updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
  metrics = {
      'train/loss': value,
      'train/grad_norm': optax.tree.norm(grads),
      'train/learning_rate': learning_rate(state.step),
  }
  params = optax.apply_updates(state.params, updates)
  return training.TrainState(state.step + 1, params, opt_state), metrics


def dense_update(state, grads, *, optimizer):
  """Takes a step of the optimizer alone, with given gradients."""
  updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
  params = optax.apply_updates(state.params, updates)
  return training.TrainState(state.step + 1, params, opt_state), ()


def first_state(params: PyTree, optimizer: Any) -> training.TrainState:
  """Creates the state at step 0, with masked parameters."""
  # A step donates the state, and the parameters are used again.
  params = jax.tree.map(jnp.copy, params)
  opt_state = optimizer.init(params)
  if isinstance(opt_state, spdf.SparsifyState):
    params = spdf.apply_mask(params, spdf.get_mask(opt_state))
  return training.TrainState(jnp.zeros([], jnp.int32), params, opt_state)


def chain_of(subject: Subject, **options: Any) -> Any:
  """Returns the dense optimizer of a subject; see `dense_adamw`."""
  return dense_adamw(subject.plan, **subject.settings, **options)


def sparsified(chain: Any, algorithm: spdf.Algorithm) -> Any:
  """Returns an optimizer that sparsifies hidden matrices by an algorithm."""
  return spdf.sparsify(chain, algorithm, where=models.sparsifiable, key=0)


def compile_update(
    subject: Subject, optimizer: Any, grads: PyTree
) -> compiled.Program:
  """Compiles a step of the optimizer alone, from the state at step 0."""
  return compiled.compile_program(
      functools.partial(dense_update, optimizer=optimizer),
      first_state(subject.params, optimizer), grads,
  )


def compile_step(
    subject: Subject,
    optimizer: Any,
    step: Callable[..., Any] = training.train_step,
    *,
    is_compact: bool = False,
    **options: Any,
) -> compiled.Program:
  """Compiles a training step, from the state at step 0.

  Args:
    subject: The model, its plan and its batch.
    optimizer: The optimizer.
    step: `training.train_step`, or `dense_train_step`.
    is_compact: Whether the state has kept values only.
    **options: Further arguments of the step.

  Returns:
    The program.
  """
  state = first_state(subject.params, optimizer)
  apply_fn = matmul.without_masks(subject.model.apply)
  if is_compact:
    state = storage.convert(state, 'compact')
    apply_fn = storage.compact_apply(
        subject.model, options.pop('sparse_steps', None)
    )
  return compiled.compile_program(
      functools.partial(
          step,
          apply_fn=apply_fn,
          optimizer=optimizer,
          learning_rate=subject.plan.learning_rate,
          **options,
      ),
      state,
      subject.batch,
  )


def compile_steps(
    subject: Subject, optimizers: Mapping[str, Any]
) -> dict[str, compiled.Program]:
  """Compiles the step of every optimizer; `'dense'` has one without masks."""
  return {
      name: compile_step(
          subject, optimizer,
          dense_train_step if name == 'dense'
          else training.train_step,
      )
      for name, optimizer in optimizers.items()
  }


def compile_native_step(
    subject: Subject,
    case: Case,
    dtype: str,
    sparsity: float,
    structure: structures.Structure | str = 'unstructured',
) -> compiled.Program:
  """Compiles a step of a model, with kept values only if it is sparse.

  Args:
    subject: The model, with its parameters and batch.
    case: Sizes of the model and the batch.
    dtype: Dtype of the computation.
    sparsity: Sparsity of the static mask; 0 for a dense step.
    structure: Structure of the mask.

  Returns:
    The program.
  """
  config = dataclasses.replace(subject.model.config, dtype=dtype)
  model = models.model_of(config)
  subject = subject._replace(model=model)
  chain = chain_of(subject)
  if not sparsity:
    return compile_step(subject, chain, dense_train_step)
  sparse = training.sparse_steps(
      'native', model, case.batch_size * case.length
  )
  return compile_step(
      subject,
      sparsified(
          chain, spdf.static(sparsity, structure=structure)
      ),
      is_compact=True, sparse_steps=sparse,
  )


def memory_rows(
    case: str,
    kind: str,
    scratch_target: float | None,
    programs: Mapping[str, compiled.Program],
) -> Iterator[measuring.Row]:
  """Yields rows of the programs' copies and scratch beyond those of `'dense'`.
  """
  dense = programs['dense']
  state_bytes = compiled.tree_bytes(dense.state.opt_state)
  copied = lambda p: compiled.copied_bytes(p, dense.state.opt_state)
  scratch = compiled.scratch_bytes
  for name, program in programs.items():
    if program is dense:
      continue
    row = functools.partial(measuring.counted_row, case)
    yield row(
        f'{name} {kind}: bytes not in place',
        compiled.unaliased_bytes(program),
        target=_LARGEST_UNALIASED,
    )
    yield row(
        f'{name} {kind}: copied / optimizer state',
        (copied(program) - copied(dense)) / state_bytes,
        target=_LARGEST_COPIED,
    )
    yield row(
        f'{name} {kind}: scratch / optimizer state',
        (scratch(program) - scratch(dense)) / state_bytes,
        target=scratch_target,
    )
