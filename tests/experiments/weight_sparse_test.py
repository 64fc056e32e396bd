"""The weight-sparse GPT and its recipe, after Gao et al., 2025."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

ROOT = pathlib.Path(__file__).parents[2]
if not (ROOT / 'experiments').is_dir():
  pytest.skip('needs the checkout', allow_module_level=True)

from configs import weight_sparse  # noqa: E402
from experiments.weight_sparse import model as models  # noqa: E402
from experiments.weight_sparse import optimizer  # noqa: E402
import spdf_jax as spdf  # noqa: E402
from spdf_jax.training.configs.config import parse  # noqa: E402
from spdf_jax.training.own_models import create_own_model  # noqa: E402
from spdf_jax.training.plan import create_plan  # noqa: E402

SIZES = dict(vocab_size=17, d_model=32, max_length=12, n_layers=2)
TOKENS = np.random.default_rng(0).integers(17, size=(2, 9))


def draw(**options):
  """Returns a model and random parameters of it, none of them zero."""
  model, _ = models.make_model(**SIZES | options)
  shapes = jax.eval_shape(model.init, jax.random.key(0), TOKENS)
  rng = np.random.default_rng(1)
  return model, jax.tree.map(
      lambda x: rng.normal(0, 0.3, x.shape).astype(np.float32), shapes
  )


def test_keep_largest_equals_a_sort():
  x = np.random.default_rng(0).normal(size=(3, 5, 40)).astype(np.float32)
  x[..., ::3] = 0
  for number in (1, 10, 27, 40):
    actual = np.asarray(models.keep_largest(x, number))
    order = np.argsort(-np.abs(x), axis=-1)[..., :number]
    wanted = np.zeros_like(x)
    np.put_along_axis(
        wanted, order, np.take_along_axis(x, order, axis=-1), axis=-1
    )
    np.testing.assert_array_equal(actual, wanted)
  grads = jax.grad(lambda x: models.keep_largest(x, 10).sum())(x)
  assert (np.asarray(grads).sum(-1) == 10).all()


def test_the_sink_takes_a_share_of_the_attention():
  rng = np.random.default_rng(0)
  q, k, v = rng.normal(size=(3, 2, 5, 4, 8)).astype(np.float32)
  sink = rng.normal(size=4).astype(np.float32)
  wanted = np.zeros(q.shape)
  for b, i, h in np.ndindex(2, 5, 4):
    weights = np.exp(k[b, :i + 1, h] @ q[b, i, h] / 8**0.5)
    wanted[b, i, h] = weights @ v[b, :i + 1, h] / (
        weights.sum() + np.exp(sink[h])
    )
  np.testing.assert_allclose(models.attend(q, k, v, sink), wanted, atol=1e-5)
  np.testing.assert_allclose(
      models.attend(q, k, v, None), models.attend(q, k, v, sink - np.inf),
      atol=1e-6,
  )


@pytest.mark.parametrize('options', [
    dict(positions=True, tied=True, sink=False),
    dict(activation='relu', biases=False, bigrams=False, n_heads=3, d_ff=40),
])
def test_logits_are_causal(options):
  model, variables = draw(**options)
  logits = model.apply(variables, TOKENS)
  assert logits.shape == (2, 9, 17)
  changed = TOKENS.copy()
  changed[:, 5:] = (changed[:, 5:] + 1) % 17
  np.testing.assert_allclose(
      model.apply(variables, changed)[:, :5], logits[:, :5], atol=1e-5
  )


def test_read_sees_sparse_activations_and_may_replace_them():
  seen = {}

  def read(name, x):
    seen[name] = x
    return jnp.zeros_like(x) if name == 'h_1/mlp_out' else x

  model, variables = draw()
  model = model.clone(read=read)
  model.apply(variables, TOKENS)
  for name in models.LOCATIONS:
    x = seen[f'h_0/{name}']
    assert ((x != 0).sum(-1) == x.shape[-1] // 4).all()
  np.testing.assert_array_equal(seen['h_1/resid_mid'], seen['resid_final'])


def test_matrices_embeddings_and_biases_are_sparsified():
  model, where = models.make_model(**SIZES)
  params = model.init(jax.random.key(0), TOKENS)['params']
  shapes = spdf.where.layer_shapes(where, params)
  assert shapes['h_0_wi/bias'] == (1, 1, 128)
  assert shapes['head/kernel'] == (1, 32, 17)
  dense = {k for k in params if not any(s.startswith(k) for s in shapes)}
  assert dense == {
      'bigrams', 'ln_f', 'h_0_ln_1', 'h_0_ln_2', 'h_1_ln_1', 'h_1_ln_2',
      'h_0_sink', 'h_1_sink',
  }


@pytest.mark.parametrize('options, message', [
    (dict(head_size=20), 'head_size is 20, which does not divide d_model 32'),
    (dict(locations=('attn_in', 'nowhere')), 'locations has nowhere'),
    (dict(kept_activations=0.01), 'keeps none of 32 activations'),
])
def test_impossible_models_are_refused(options, message):
  with pytest.raises(ValueError, match=message):
    models.make_model(**SIZES | options)


@pytest.mark.parametrize('normalize', [True, False])
@pytest.mark.parametrize('size', [0.01, 100.0])
def test_gradients_are_scaled_by_the_root_mean_square_of_all(normalize, size):
  rng = np.random.default_rng(0)
  grads = {'a': rng.normal(size=(4, 8)), 'b': rng.normal(size=9)}
  grads = jax.tree.map(lambda g: np.float32(size * g), grads)
  tx = optimizer.scale_by_rms(1.0, normalize)
  scaled, _ = tx.update(grads, tx.init(grads))
  rms = np.sqrt(np.mean(np.concatenate(
      [np.ravel(g) ** 2 for g in grads.values()]
  )))
  factor = 1 / rms if normalize or rms > 1 else 1
  for name, g in grads.items():
    np.testing.assert_allclose(scaled[name], factor * g, rtol=1e-5)


def test_scale_by_kept_multiplies_by_a_power_of_the_kept_fraction():
  params = {'w': jnp.eye(4), 'zero': jnp.zeros(3), 'dense': jnp.ones(2)}
  tx = optimizer.scale_by_kept(-0.5)
  ones = jax.tree.map(jnp.ones_like, params)
  updates, _ = tx.update(ones, tx.init(params), params)
  assert {k: float(u.ravel()[0]) for k, u in updates.items()} == {
      'w': 2.0, 'zero': 1.0, 'dense': 1.0
  }


@pytest.mark.parametrize('arg', ['', 'kept=1', 'kept=1/256,width=64,layers=1'])
def test_the_recipe_makes_a_plan(arg):
  config = parse(weight_sparse.get_config(arg))
  plan = create_plan(
      config.phases, tokens_per_epoch={'corpus': lambda n: 1e7}, parameters=1,
  )
  model = create_own_model(config.model.preset, config.model.sizes)
  params = jax.eval_shape(
      model.init, jax.random.key(0), np.zeros((1, 2), np.int32)
  )['params']
  assert plan.thresholds == (arg != 'kept=1')
  optimizer = config.optimizer.constructor(model.where)
  assert isinstance(optimizer(learning_rate=1.0), optax.GradientTransformation)
  layers = spdf.where.layer_shapes(model.where, params)
  names = {
      name: jax.ShapeDtypeStruct(s, 'float32') for name, s in layers.items()
  }
  for step, share in ((0, 0.0), (500, 0.5), (1000, 1.0), (1999, 1.0)):
    sparsities = plan.algorithm.sparsity_at(step, names)
    top = {'': 15 / 16, 'kept=1': 0.0}.get(arg, 255 / 256)
    assert sparsities['h_0_wi/kernel'] == pytest.approx(share * top, abs=1e-6)
  jax.eval_shape(plan.algorithm.init, jax.random.key(0), names)


@pytest.mark.ci
def test_a_tiny_model_learns_with_exact_counts():
  model, where = models.make_model(**SIZES)
  tx = spdf.hard_threshold(
      optimizer.adamw(3e-3), 0.75, least=1, where={
          '*/bias': False, '*': where,
      },
  )
  rng = np.random.default_rng(0)
  tokens = (rng.integers(17, size=(16, 1)) + np.arange(10)) % 17
  params = model.init(jax.random.key(0), TOKENS)['params']
  state = tx.init(params)
  params = spdf.apply_mask(params, spdf.get_mask(state))

  @jax.jit
  def step(params, state):
    def loss(params):
      logits = model.apply({'params': params}, tokens[:, :-1])
      return optax.softmax_cross_entropy_with_integer_labels(
          logits, tokens[:, 1:]
      ).mean()
    value, grads = jax.value_and_grad(loss)(params)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value

  losses = []
  for _ in range(60):
    params, state, loss = step(params, state)
    losses.append(float(loss))
  spdf.check_zeros(params, state)
  assert losses[-1] < 0.5 * losses[0]
