"""A run that trains in a second, shared by tests of training."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from spdf_jax import data
from spdf_jax import models
from spdf_jax import training
from spdf_jax.training.configs.config import parse
from spdf_jax.training.loop.metrics import read_rows
from spdf_jax.training.programs import Programs
from spdf_jax.training.step import mesh as meshes
from spdf_jax.training.step import teacher

V, L = 16, 8
CORPUS = types.SimpleNamespace(tokenizer=data.ByteTokenizer())
DENSE = dict(name='dense')


def static(sparsity):
  """The algorithm of a phase with a random mask."""
  return dict(name='static', sparsity=sparsity)


RATE = dict(schedule='cosine', peak=1e-2, warmup='2 steps', final_fraction=0.1)
PHASE = dict(
    duration='5 steps', data='corpus', batch_size=2, length=L,
    algorithm=static(0.75), learning_rate=RATE, weight_decay=0.1,
    reset_moments=False, new_epoch=False, early_stop=None,
)
PHASES = {
    'pretrain': PHASE,
    'continuation': PHASE | dict(
        algorithm=DENSE, learning_rate=RATE | dict(schedule='continue')
    ),
    'finetune': PHASE | dict(
        duration='4 steps', algorithm=DENSE, batch_size=3, reset_moments=True
    ),
}
CONFIG = dict(
    seed=0,
    model=dict(
        preset='gpt-mini', vocab_size=V, n_layers=1, n_heads=2, d_model=16,
        d_ff=16, max_length=L,
    ),
    matmul='dense',
    storage='dense',
    loss=dict(label_smoothing=0.0, z_loss=0.0, chunk=0),
    micro_batches=1,
    max_skipped_steps=0,
    mesh=dict(data=-1, fsdp=1, tensor=1),
    data=dict(
        corpus='text', tokenizer='bytes', task='', task_dir='',
        cache_dir='anywhere', max_epochs=dict(corpus=1, task=1),
        planned=dict(tokens=0, vocab_size=0, examples=0),
    ),
    optimizer=dict(b1=0.9, b2=0.95, eps=1e-8, clip_norm=1.0),
    phases=dict(order=list(PHASES), **PHASES),
    evaluation=dict(
        batch_size=2, corpus_batches=1, task_batches=1, generations=0,
        max_new_tokens=1,
    ),
    eval_every=3,
    log_every=1,
    checkpoints=dict(every=2, keep=2),
    resume='',
    init_from='',
)


class Text:
  """Random tokens, a function of the row; 1000 rows of any length."""

  def __init__(self, fingerprint='abc'):
    self.fingerprint = fingerprint

  def block_length(self, lengths):
    return max(lengths)

  def num_blocks(self, block_length):
    return 1000

  def read(self, blocks, offsets, *, block_length, length):
    tokens = np.stack([
        np.random.default_rng([block, offset]).integers(V, size=length + 1)
        for block, offset in zip(blocks, offsets)
    ]).astype(np.int32)
    ones = np.ones((len(tokens), length), np.float32)
    return data.Batch(tokens[:, :-1], tokens[:, 1:], ones)


def make_config(**changes):
  """Parses the config with changes; names of `changes` have `__` for dots."""
  config = ml_collections.ConfigDict(CONFIG)
  with config.unlocked(), config.ignore_type():
    config.update_from_flattened_dict(
        {name.replace('__', '.'): v for name, v in changes.items()}
    )
  return parse(config)


def run_of(config, fingerprint='abc'):
  """Creates the run of a parsed config on random tokens."""
  source = Text(fingerprint)
  model = models.model_of(config.model.sizes)
  init = jax.jit(lambda: model.init(
      jax.random.key(config.seed), jnp.zeros((1, 2), jnp.int32)
  )['params'])
  plan = training.create_plan(
      config.phases, tokens_per_epoch={'corpus': lambda n: 1000 * n},
      parameters=1,
  )
  mesh = meshes.create_mesh(**dataclasses.asdict(config.mesh))
  return training.Run(CORPUS, None, Programs(
      config, model, mesh, {'corpus': source}, init,
      teacher.loss_opener(config.loss, mesh), plan,
  ))


def with_programs(run, **changes):
  """Returns a run with changed fields of its programs."""
  return dataclasses.replace(
      run, programs=dataclasses.replace(run.programs, **changes)
  )


def make_run(fingerprint='abc', **changes):
  """Creates a run of 14 steps in three phases, 75 % sparse then dense."""
  run = run_of(make_config(**changes), fingerprint)
  # Compiled once for all runs.
  vars(run.programs)['step'] = shared_step(
      run.config.seed, run.config.model.sizes.d_model,
      min(run.config.max_skipped_steps, 1),
  )
  return run


def damage_batches(run, steps):
  """Makes the losses of steps, counted from 1, NaN; returns the run."""
  batch_at = run.programs.batch_at

  def damaged(step, rows):
    batch = batch_at(step, rows)
    return batch._replace(weights=batch.weights * np.nan**(step + 1 in steps))

  vars(run.programs)['batch_at'] = damaged
  return run


@functools.cache
def make_dynamic_run():
  """Builds the same run with mask updates in its first phase."""
  return run_of(make_config(phases__pretrain__algorithm=dict(
      name='rigl', update_every=1, update_until=4, drop_fraction=0.3,
      sparsity=dict(schedule='cubic', initial=0.25, final=0.75, steps=4),
  )))


@functools.cache
def shared_step(seed, d_model, max_skipped_steps):
  return run_of(make_config(
      seed=seed, model__d_model=d_model, max_skipped_steps=max_skipped_steps
  )).programs.step


def assert_same_arrays(one, other):
  """Asserts that two trees are equal bit for bit, types included."""
  assert jax.tree.structure(one) == jax.tree.structure(other)
  for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other)):
    assert x.dtype == y.dtype
    assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def rows_in(workdir, first=1):
  """Returns the rows of metrics from a step on, without times."""
  return [
      {k: v for k, v in row.items() if not k.startswith('time/')}
      for row in read_rows(workdir / 'metrics.jsonl') if row['step'] >= first
  ]


def total(step, params):
  """Evaluates what changes with every step."""
  yield 'validation/loss', float(jnp.sum(params['wte']['embedding']))


class Stopped(Exception):
  """The end of a run that a test stops."""


def stopping_at(stop, evaluate=total):
  """Returns evaluators that stop a run at a step."""
  def evaluate_or_stop(step, params):
    if step == stop:
      raise Stopped
    yield from evaluate(step, params)

  return training.Evaluators([evaluate_or_stop])
