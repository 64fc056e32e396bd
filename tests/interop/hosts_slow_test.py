"""Hosts from the package index train with their own code, in environments.

MaxText needs Python 3.12, and nanodo and JaxPruner are on no index: their paths
are rebuilt in `hosts_test.py`.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import textwrap

import pytest

ROOT = pathlib.Path(__file__).parents[2]
pytestmark = pytest.mark.slow

# Prints the fraction of zeros of every parameter as the last line.
REPORT = '''
import json, os
os.environ['JAX_PLATFORMS'] = 'cpu'
import jax, jax.numpy as jnp, numpy as np, optax
import spdf_jax as spdf
rigl = spdf.rigl(0.75, update_every=2, update_until=4)
def report(params, opt_state):
  spdf.check_zeros(params, opt_state)
  print(json.dumps({
      jax.tree_util.keystr(path, simple=True, separator='/'):
          float((leaf == 0).mean())
      for path, leaf in jax.tree_util.tree_leaves_with_path(params)
  }))
'''

TUNIX = '''
from flax import nnx
from spdf_jax import accelerator
from tunix.models.llama3 import model as llama
from tunix.sft import peft_trainer
model = llama.Llama3(
    llama.ModelConfig(
        num_layers=2, vocab_size=256, embed_dim=64, hidden_dim=128, num_heads=4,
        head_dim=16, num_kv_heads=2, rope_theta=10_000, norm_eps=1e-5,
    ),
    rngs=nnx.Rngs(0),
)
for i, layer in enumerate(model.layers):  # Tunix starts them at zero.
  for j, name in enumerate(('gate_proj', 'up_proj', 'down_proj')):
    kernel = getattr(layer.mlp, name).kernel
    key = jax.random.key(8 * i + j)
    kernel[...] = 0.1 * jax.random.normal(key, kernel.shape)
trainer = peft_trainer.PeftTrainer(
    model,
    spdf.sparsify(optax.adamw(1e-3), rigl, where=spdf.where.per_head, key=0),
    peft_trainer.TrainingConfig(eval_every_n_steps=100, max_steps=6),
).with_gen_model_input_fn(lambda x: dict(
    input_tokens=x.input_tokens, input_mask=x.input_mask,
    positions=jnp.tile(jnp.arange(16), (4, 1)),
    attention_mask=jnp.tile(jnp.tril(jnp.ones((16, 16), bool)), (4, 1, 1)),
))
# Its later versions read the dtype of every variable before an update.
jax.tree.map(
    lambda v: v.get_value().dtype, nnx.state(trainer.optimizer, nnx.OptState),
    is_leaf=lambda x: isinstance(x, nnx.Variable),
)
tokens = np.random.default_rng(0).integers(0, 256, (4, 16))
batch = peft_trainer.TrainingInput(
    input_tokens=tokens, input_mask=np.ones((4, 16), bool)
)
axes = (jax.sharding.AxisType.Auto,) * 2
with jax.make_mesh((1, 1), ('fsdp', 'tp'), axis_types=axes):
  trainer.train([batch] * 6)

# The same model in a loop of one's own, with products that skip zeros.
graph, params = nnx.split(model, nnx.Param)
tx = spdf.sparsify(
    optax.adamw(1e-3), spdf.static(0.75), where=spdf.where.per_head, key=0
)
def loss(params, x):
  positions = jnp.broadcast_to(jnp.arange(16), x.shape)
  causal = jnp.tril(jnp.ones((len(x), 16, 16), bool))
  logits, _ = nnx.merge(graph, params)(x, positions, None, causal)
  return optax.softmax_cross_entropy_with_integer_labels(
      logits[:, :-1], x[:, 1:]
  ).mean()
def losses(loss):
  opt_state = tx.init(params)
  kept = spdf.apply_mask(params, spdf.get_mask(opt_state))
  @jax.jit
  def step(params, opt_state, x):
    masks = spdf.get_masks(opt_state)
    value, grads = jax.value_and_grad(loss)(params, x, masks)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value
  values = []
  for i in range(20):
    x = jax.random.randint(jax.random.key(i), (4, 16), 0, 256)
    kept, opt_state, value = step(kept, opt_state, x)
    values.append(value)
  return np.array(values)
fast = spdf.skip_zeros(loss, lowering='native')
np.testing.assert_allclose(
    losses(lambda params, x, masks: fast(params, x, **masks)),
    losses(lambda params, x, masks: loss(params, x)), rtol=1e-4,
)
table = accelerator.explain(loss, lowering='native')(
    params, jnp.asarray(tokens), mask=spdf.get_mask(tx.init(params))
)
assert table.dense == {} and len(table.reached) == 14, table
report(nnx.state(model, nnx.Param), trainer.optimizer.opt_state)
'''

EASYDEL = '''
import importlib, sys, tempfile, types
# EasyDeL imports these of transformers, which need PyTorch.
for name in (
    'dbrx', 'glm4v_moe', 'llama4', 'phimoe', 'qwen3_5_moe', 'qwen3_next'
):
  path = f'transformers.models.{name}'
  sys.modules[f'{path}.modeling_{name}'] = types.ModuleType(name)
  setattr(
      importlib.import_module(path), f'modeling_{name}',
      sys.modules[f'{path}.modeling_{name}'],
  )
import easydel as ed
from datasets import Dataset
from flax import nnx
from spdf_jax import interop
model = ed.LlamaForCausalLM(
    ed.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, vocab_size=256,
        max_position_embeddings=64,
        attn_mechanism=ed.AttentionMechanisms.VANILLA,
    ),
    rngs=nnx.Rngs(0), dtype=jnp.float32, param_dtype=jnp.float32,
)
tokens = np.random.default_rng(0).integers(0, 256, (32, 16)).astype(np.int32)
rows = Dataset.from_dict(dict(
    input_ids=tokens.tolist(), attention_mask=np.ones_like(tokens).tolist()
))
stack = lambda rows: {
    k: np.stack([np.asarray(row[k]) for row in rows])
    for k in ('input_ids', 'attention_mask')
}
with tempfile.TemporaryDirectory() as folder:
  arguments = ed.TrainingArguments(
      num_train_epochs=1, total_batch_size=4, learning_rate=1e-3,
      max_training_steps=6, max_length=16, save_directory=folder,
      use_wandb=False, do_last_save=False, use_grain=True,
      progress_bar_type='json', save_optimizer_state=False,
      pruning_module=interop.Updater(rigl, key=0),
  )
  state = ed.Trainer(
      arguments=arguments, model=model, dataset_train=rows, data_collator=stack
  ).train().state
assert int(state.step) == 6
report(state.graphstate, state.opt_state)
'''

LEVANTER = '''
import dataclasses
import equinox as eqx
import haliax as hax
import jmp
from levanter.models.llama import LlamaConfig, LlamaLMHeadModel
from levanter.optim import AdamConfig, OptimizerConfig
from levanter.trainer_state import TrainerState
where = {
    '*/q_proj': spdf.MatrixAxes(-1, (1, 2, 3)),
    '*/[kv]_proj': spdf.MatrixAxes(-1, (1, 2)),
    '*/o_proj': spdf.MatrixAxes((2, 3), 1),
    '*/mlp': spdf.MatrixAxes(2, 1),
}
@OptimizerConfig.register_subclass('sparse_adam')
@dataclasses.dataclass(frozen=True)
class SparseAdamConfig(AdamConfig):
  def build(self, num_train_steps):
    return spdf.sparsify(
        super().build(num_train_steps), rigl, where=where, key=0
    )
config = LlamaConfig(
    seq_len=16, hidden_dim=64, intermediate_dim=128, num_layers=2, num_heads=4,
    num_kv_heads=2,
)
model = LlamaLMHeadModel.init(
    hax.Axis('vocab', 256), config, key=jax.random.key(0)
)
axes = hax.Axis('batch', 4), model.Pos.resize(16)
tokens = hax.random.randint(jax.random.key(1), axes, 0, 256)
def loss_fn(model):
  logits = model(tokens, None, key=jax.random.key(0)).array
  return optax.softmax_cross_entropy_with_integer_labels(
      logits[:, :-1], tokens.array[:, 1:]
  ).mean()
state = TrainerState.init(
    SparseAdamConfig(learning_rate=1e-3, warmup=0).build(6), model,
    key=jax.random.key(2), mp=jmp.get_policy('f32'),
)
@eqx.filter_jit
def step(state):
  loss, grads = eqx.filter_value_and_grad(loss_fn)(state.model)
  state, _ = state.take_step(
      grads, obj_fun=loss_fn, loss=loss, key=jax.random.key(3)
  )
  return state
for _ in range(6):
  state = step(state)
report(eqx.filter(state.model, eqx.is_inexact_array), state.opt_state)
'''

KAULDRON = '''
import dataclasses, tempfile
from flax import linen as nn
from kauldron import kd, konfig
class Model(nn.Module):
  tokens: kd.kontext.Key = 'batch.tokens'
  @nn.compact
  def __call__(self, tokens):
    x = nn.Embed(64, 32)(tokens)
    x = x + nn.MultiHeadDotProductAttention(num_heads=4)(x, x)
    x = x + nn.Dense(32, name='wo')(nn.gelu(nn.Dense(64, name='wi')(x)))
    return nn.Dense(64, name='head')(x)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Loss(kd.losses.Loss):
  preds: kd.kontext.Key = 'preds'
  tokens: kd.kontext.Key = 'batch.tokens'
  def get_values(self, preds, tokens):
    return optax.softmax_cross_entropy_with_integer_labels(
        preds, tokens)[..., None]
with konfig.imports():
  import optax as lazy_optax
  import spdf_jax as lazy_spdf
tx = konfig.resolve(lazy_spdf.sparsify(
    lazy_optax.adam(0.003),
    lazy_spdf.rigl(0.75, update_every=2, update_until=4),
    where=lazy_spdf.where.per_head, key=0,
))
tokens = np.random.default_rng(0).integers(0, 64, (4, 8))
with tempfile.TemporaryDirectory() as folder:
  trainer = kd.train.Trainer(
      workdir=folder, model=Model(), optimizer=tx, num_train_steps=6,
      train_ds=kd.data.py.DataSource(
          data_source=[dict(tokens=row) for row in tokens] * 8, batch_size=4,
          shuffle=False, num_workers=0,
      ),
      train_losses={'loss': Loss()},
      log_metrics_every=100, log_summaries_every=100,
  )
  state = trainer.init_state()
  for _, batch in zip(range(6), trainer.train_ds):
    state, _ = trainer.trainstep.step(state, batch, return_losses=True)
report(state.params, state.opt_state)
'''

HOSTS = {
    # Package, further packages, program, and the names of hidden matrices.
    'tunix': ('google-tunix==0.1.7', [], TUNIX, ('/attn/', '/mlp/')),
    # It depends on jax < 0.10, and imports Pillow without depending on it.
    'easydel': (
        'easydel==0.3.0', ['pillow'], EASYDEL, ('/self_attn/', '/mlp/')
    ),
    # It imports two packages without depending on them.
    'levanter': (
        'levanter==1.2.dev1644', ['chex', 'gitpython'], LEVANTER,
        ('/self_attn/', '/mlp/'),
    ),
    'kauldron': (
        'kauldron==1.4.2', [], KAULDRON,
        ('query/kernel', 'key/kernel', 'value/kernel', 'out/kernel',
         'wi/kernel', 'wo/kernel'),
    ),
}


def run(*words, **variables):
  return subprocess.run(
      words, env=os.environ | variables, capture_output=True, text=True,
      timeout=900,
  )


@pytest.fixture
def environment(tmp_path):
  """Returns a function that makes an environment with packages and us."""
  def install(*packages):
    run(sys.executable, '-m', 'venv', str(tmp_path / 'tools'))
    tools = tmp_path / 'tools' / 'bin'
    # pip takes over a quarter of an hour to resolve some hosts' dependencies.
    done = run(str(tools / 'pip'), 'install', '-q', 'uv')
    if done.returncode:
      pytest.skip(f'uv cannot be installed: {done.stderr[-500:]}')
    python = tmp_path / 'host' / 'bin' / 'python'
    uv = str(tools / 'uv')
    run(uv, 'venv', '--python', sys.executable, str(tmp_path / 'host'))
    into = ('pip', 'install', '--python', str(python))
    done = run(uv, *into, '--prerelease=allow', *packages)
    if done.returncode:
      pytest.skip(f'{packages[0]} cannot be installed: {done.stderr[-500:]}')
    # Without dependencies, because one host has a lower jax than we require.
    source = tmp_path / 'source'  # A build writes into its folder.
    shutil.copytree(ROOT / 'spdf_jax', source / 'spdf_jax')
    for name in ('setup.py', 'pyproject.toml', 'README.md', 'LICENSE'):
      shutil.copy(ROOT / name, source)
    done = run(uv, *into, '--no-deps', str(source))
    assert not done.returncode, done.stderr
    return str(python)

  return install


@pytest.mark.parametrize('host', [
    'tunix', 'easydel', 'levanter', 'kauldron',
])
def test_training_elsewhere_ends_with_exact_zeros(host, environment, tmp_path):
  package, others, program, hidden = HOSTS[host]
  python = environment(package, *others)
  script = tmp_path / 'program.py'
  script.write_text(textwrap.dedent(REPORT + program))
  trained = run(python, str(script), HF_HUB_OFFLINE='1', WANDB_MODE='disabled')
  assert not trained.returncode, trained.stderr[-3000:]
  zeros = json.loads(trained.stdout.splitlines()[-1])
  matrices = {p: z for p, z in zeros.items() if any(h in p for h in hidden)}
  assert len(matrices) >= 6
  assert set(matrices.values()) == {0.75}, matrices
  for path in set(zeros) - set(matrices):
    if 'emb' in path or 'head' in path:
      assert zeros[path] < 0.01, path
