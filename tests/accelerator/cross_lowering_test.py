"""Programs traced on a CPU lower to those of GPUs and TPUs.

Nothing is compiled: the text of a module shows the operations that a GPU or TPU
would run.
"""

import collections
import functools
import itertools
import re

import jax
from jax import export
import jax.numpy as jnp
import pytest

from spdf_jax import data
from spdf_jax.accelerator import bf16_matmul
from spdf_jax.evaluation import CachedModel
from spdf_jax.evaluation import generation
from spdf_jax.evaluation import loss
from spdf_jax.evaluation import sampler
from spdf_jax.training.step import mesh as meshes
from tests import tiny_run

CUDNN = ('__cudnn$fmhaSoftmax', '__cudnn$fmhaSoftmaxBackward')
HISTOGRAM = 'tensor<2048xi32>'  # Counts of the top-k on CPUs.
TIMES = dict(update_every=2, update_until=4)
ALGORITHMS = {
    'static': dict(name='static', sparsity=0.75),
    'rigl': dict(name='rigl', sparsity=0.75, drop_fraction=0.3, **TIMES),
    'gmp': dict(name='gmp', sparsity=dict(
        schedule='cubic', initial=0.0, final=0.75, steps=4
    ), **TIMES),
}
PLATFORMS = ('cuda', 'rocm', 'tpu')


def cases(names, main):
  """Returns all cases of programs; most are slow, those of `main` are not."""

  def tier(name, *target):
    if name == main:
      return () if target == ('cuda', 1) else pytest.mark.ci
    return pytest.mark.ci if target == ('cuda', 8) else pytest.mark.slow

  return [
      pytest.param(*case, marks=tier(*case))
      for case in itertools.product(names, PLATFORMS, (1, 8))
  ]


def make_run(algorithm='static', devices=1, **changes):
  """Creates a run, on 8 devices on a mesh that this machine need not have."""
  run = tiny_run.run_of(tiny_run.make_config(
      phases__pretrain__algorithm=ALGORITHMS[algorithm],
      # Layers of 4096 weights, the fewest that CPUs rank by histograms.
      **dict(model__dtype='bfloat16', model__d_ff=256) | changes,
  ))
  if devices == 8:
    vars(run.programs)['mesh'] = jax.sharding.AbstractMesh(
        (2, 2, 2), meshes.AXES, axis_types=(jax.sharding.AxisType.Auto,) * 3
    )
  return run


def make_batch(run, rows=8, length=8):
  shape = functools.partial(
      jax.ShapeDtypeStruct, (rows, length),
      sharding=meshes.batch_sharding(run.programs.mesh, rows),
  )
  return data.Batch(shape(jnp.int32), shape(jnp.int32), shape(jnp.float32))


def replicated(run, tree):
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=jax.NamedSharding(run.programs.mesh, jax.P())
  ), tree)


def step(run):
  return run.programs.step, (run.programs.abstract_state, make_batch(run))


def evaluation(run):
  apply_fn = lambda params, tokens: run.model.apply({'params': params}, tokens)
  return jax.jit(functools.partial(loss.batch_sums, apply_fn)), (
      run.programs.abstract_state.params, *make_batch(run)
  )


def generating(run):
  decoder, choose = CachedModel(run.model), sampler(0.8, top_k=4, top_p=0.9)

  def generate(params, tokens, cursors, key):
    cache = generation.prefill(decoder, params, tokens, prompt_length=5)
    last = jnp.take_along_axis(tokens, cursors[:, None], 1)
    logits, cache = decoder(params, cache, last, cursors[:, None])
    keys = jax.random.split(key, len(tokens))
    return jax.vmap(choose)(keys, logits[:, 0]), cache

  # One sequence, whose products XLA:CPU computes as those of two.
  shapes = jax.eval_shape(lambda: (
      jnp.zeros((1, 8), jnp.int32), jnp.zeros(1, jnp.int32), jax.random.key(0)
  ))
  return jax.jit(generate), (
      run.programs.abstract_state.params, *replicated(run, shapes)
  )


def optimizer(run):
  params = run.programs.abstract_state.params
  return jax.jit(run.programs.optimizer.update, donate_argnums=1), (
      params, run.programs.abstract_state.opt_state, params
  )


PROGRAMS = dict(
    step=step, evaluation=evaluation, generating=generating,
    optimizer=optimizer,
)


def exported(program, platform):
  """Lowers a program for a platform; calls of kernels of CPUs are refused."""
  function, args = program
  return export.export(function, platforms=[platform], disabled_checks=[
      export.DisabledSafetyCheck.custom_call(name) for name in CUDNN
  ])(*args)


def calls_in(text):
  return set(re.findall(r'custom_call @([\w$.]+)', text))


def gathers_of_masks(text):
  """Returns operations that read a mask by indices or replicate or sort it."""
  is_gather = re.compile(
      r'(stablehlo\.(all_gather|dynamic_gather|gather|sort)\b'
      r'|sharding_constraint .*<@\w+, \[\{\}).*xi1>'
  )
  return [line for line in text.splitlines() if is_gather.search(line)]


def assert_is_of(platform, program, devices):
  text = program.mlir_module()
  assert program.platforms == (platform,) and program.nr_devices == devices
  assert not calls_in(text)
  assert not re.search(r'(<|x)f64>', text)
  assert HISTOGRAM not in text
  assert not gathers_of_masks(text)


@pytest.mark.parametrize(
    'algorithm, platform, devices', cases(ALGORITHMS, 'rigl')
)
def test_a_training_step_is_lowered(algorithm, platform, devices):
  program = exported(step(make_run(algorithm, devices)), platform)
  assert_is_of(platform, program, devices)


@pytest.mark.ci
def test_histograms_rank_weights_on_cpus_only():
  assert HISTOGRAM in exported(step(make_run('rigl')), 'cpu').mlir_module()


@pytest.mark.parametrize('name, platform, devices', cases(
    ['evaluation', 'generating', 'optimizer'], 'generating'
))
def test_evaluation_generation_and_optimizers_are_lowered(
    name, platform, devices
):
  program = exported(PROGRAMS[name](make_run('rigl', devices)), platform)
  assert_is_of(platform, program, devices)


def test_generation_by_scanned_layers_has_the_products_of_one_layer():
  products = []
  for layers in (2, 4):
    run = make_run(model__scan_layers=True, model__n_layers=layers)
    text = exported(generating(run), 'cuda').mlir_module()
    products.append(text.count('dot_general'))
  assert products[0] == products[1] > 0


@pytest.mark.ci
def test_native_kernels_of_a_traced_step_are_for_cpus_only():
  run = make_run(
      matmul='native', model__dtype='float32', model__d_model=64,
      phases__pretrain__batch_size=8,
  )
  if run.programs.sparse_steps is None:
    pytest.skip('this machine has no native kernels')
  assert_is_of('cuda', exported(step(run), 'cuda'), devices=1)


@pytest.fixture
def has_cudnn(monkeypatch):
  """JAX traces cuDNN's attention only where it finds the library."""
  name = 'jax._src.cudnn.fused_attention_stablehlo'
  pytest.importorskip(name)
  monkeypatch.setattr(f'{name}.check_cudnn_version', lambda: 91_000)


@pytest.mark.parametrize('dtype, platform', [('bfloat16', 'cuda'), *(
    pytest.param(*case, marks=pytest.mark.ci) for case in (
        ('float32', 'cuda'), ('bfloat16', 'rocm'), ('bfloat16', 'tpu')
    )
)])
def test_attention_is_by_cudnn_in_16_bits_on_cuda_only(
    dtype, platform, has_cudnn
):
  program = exported(step(make_run(model__dtype=dtype)), platform)
  by_cudnn = platform == 'cuda' and dtype == 'bfloat16'
  assert calls_in(program.mlir_module()) == (set(CUDNN) if by_cudnn else set())


@pytest.mark.parametrize('name', [
    'step', *(pytest.param(name, marks=pytest.mark.ci) for name in (
        'evaluation', 'generating'
    ))
])
def test_lowering_for_cuda_gives_the_products_of_a_trace_on_a_gpu(
    name, monkeypatch
):
  monkeypatch.setattr(bf16_matmul, 'multiplies_bfloat16', lambda: True)

  def products():
    function, args = PROGRAMS[name](make_run())
    lowered = function.trace(*args).lower(lowering_platforms=('cuda',))
    return collections.Counter(
        map(sizes_of, re.findall(r'dot_general .* : (.*)', lowered.as_text()))
    )

  on_cpu = products()
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  assert on_cpu == products() and on_cpu


def sizes_of(types):
  """Returns sizes and dtypes of a product's operands and of its result."""
  x, y, z = (
      '×'.join(sorted(shape.split('x')))
      for shape in re.findall(r'tensor<(\w+)>', types)
  )
  return *sorted((x, y)), z
