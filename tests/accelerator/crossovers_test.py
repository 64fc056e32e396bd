"""`auto` uses kernels where they are known, or measured, to be faster."""

import functools
import types

import jax
from jax.extend import backend as backends
import jax.numpy as jnp
import pytest

from spdf_jax import models
from spdf_jax import training
from spdf_jax.accelerator import crossovers
from spdf_jax.accelerator import native
from spdf_jax.accelerator import processor
from spdf_jax.accelerator.native import library
from tests import tiny_run
from tests.refusals import refuse

pytestmark = pytest.mark.skipif(
    not native.is_available(), reason='no native kernels here'
)

DENSE = dict(name='dense')
BLOCKS = dict(name='static', sparsity=0.75, structure=dict(
    structure='block', inputs=32, outputs=32
))


@pytest.fixture
def on_processor(monkeypatch, tmp_path):
  """Returns a function that simulates a processor, with an empty cache."""
  def simulate(vendor, kernels):
    monkeypatch.setattr(processor, 'vendor', lambda: vendor)
    monkeypatch.setattr(native, 'kernels', lambda dtype: kernels)
    monkeypatch.setattr(library, 'build', lambda: tmp_path / 'libspdf.so')

  return simulate


def test_with_amx_bfloat16_kernels_are_used_for_almost_no_weights_only(
    on_processor, monkeypatch
):
  on_processor('GenuineIntel with AMX', 'avx512bf16')
  monkeypatch.setattr(native, 'is_available', lambda dtype: True)
  model = models.create_model('gpt-mini', vocab_size=64, dtype='bfloat16')
  assert training.sparse_steps('auto', model, tokens=1024).crossover == 0.95
  on_processor('AuthenticAMD', 'avx512bf16')
  assert training.sparse_steps('auto', model, tokens=1024).crossover == 0.45


def test_half_of_the_weights_stay_dense_in_bfloat16_from_zen_5_on(on_processor):
  on_processor('AuthenticAMD from Zen 5 on', 'avx512bf16')
  assert 0.5 < crossovers.known_crossover('bfloat16') < 0.75


def test_steps_with_masks_of_blocks_have_their_own_crossover(
    on_processor, monkeypatch
):
  on_processor('GenuineIntel with AMX', 'avx512bf16')
  monkeypatch.setattr(native, 'is_available', lambda dtype: True)
  monkeypatch.setattr(native, 'has_matrix_unit', lambda: True)
  model = models.create_model('gpt-mini', vocab_size=64, dtype='bfloat16')
  choose = functools.partial(training.sparse_steps, 'auto', model, tokens=1024)
  assert choose(in_blocks=True).crossover < 0.5
  assert choose(in_blocks=False).crossover == 0.95


def test_an_unknown_processor_is_measured_once(
    on_processor, monkeypatch, tmp_path, caplog
):
  caplog.set_level('INFO', logger='spdf_jax')
  on_processor('Unheard', 'avx2')
  measured = []

  def measure(*args):
    measured.append(args)
    return 0.8

  monkeypatch.setattr(crossovers, 'measure_crossover', measure)
  limits = [crossovers.crossover('float32', 64, 4096) for _ in range(2)]
  assert limits == [0.8, 0.8] and measured == [
      ('float32', 64, 1024, False)
  ]
  assert 'Unheard' in caplog.text and 'above 80.0%' in caplog.text
  cache, = tmp_path.iterdir()
  assert f'kept in {cache}' in caplog.text
  for damaged in ('half', '{}', '{"crossover": 7.0}'):
    cache.write_text(damaged)
    with pytest.raises(ValueError, match='delete it, so that the kernels are'):
      crossovers.crossover('float32', 64, 4096)


def test_a_measurement_holds_for_one_kind_of_processor_and_number_of_cores(
    on_processor, monkeypatch
):
  on_processor('Unheard', 'avx2')
  values = iter([0.8, 0.7, 0.6])
  monkeypatch.setattr(crossovers, 'measure_crossover', lambda *_: next(values))
  find = functools.partial(crossovers.crossover, 'float32', 64, 4096)
  monkeypatch.setattr(processor, 'cpuinfo', lambda: 'model\t: 1\nMHz\t: 9\n')
  assert find() == 0.8
  monkeypatch.setattr(processor, 'cpuinfo', lambda: 'model\t: 2\nMHz\t: 9\n')
  assert find() == 0.7
  monkeypatch.setattr(processor, 'cpuinfo', lambda: 'model\t: 1\nMHz\t: 8\n')
  assert find() == 0.8
  monkeypatch.setattr(processor, 'cores', lambda: 77)
  assert find() == 0.6


def test_a_measurement_that_cannot_be_cached_is_used(
    on_processor, monkeypatch, caplog
):
  on_processor('Unheard', 'avx2')
  monkeypatch.setattr(crossovers, 'measure_crossover', lambda *_: 0.8)

  def full(*_):
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr(crossovers.files, 'write_atomically', full)
  assert crossovers.crossover('float32', 64, 4096) == 0.8
  assert 'the next run measures again: [Errno 28] No space' in caplog.text


@pytest.mark.parametrize('vendor, wanted', [
    ('GenuineIntel with AMX', 0.2), ('AuthenticAMD', 0.3), ('Unheard', 0.1),
])
def test_the_crossover_of_block_masks_is_at_most_that_of_other_masks(
    on_processor, monkeypatch, vendor, wanted
):
  on_processor(vendor, 'avx512')
  measured = lambda *args: 0.1 if args[-1] else 0.6
  monkeypatch.setattr(crossovers, 'measure_crossover', measured)
  limits = [crossovers.crossover('float32', 128, 64, b) for b in (True, False)]
  assert limits[0] == wanted and limits[0] <= limits[1]


def test_masks_of_blocks_have_the_crossover_of_the_matrix_unit(
    on_processor, monkeypatch, tmp_path
):
  monkeypatch.setattr(crossovers, 'measure_crossover', lambda *args: 0.2)
  monkeypatch.setattr(native, 'has_matrix_unit', lambda: True)
  on_processor('GenuineIntel with AMX', 'avx512bf16')
  limits = [crossovers.crossover('bfloat16', 128, 64, b) for b in (True, False)]
  assert limits[0] < limits[1] == 0.95 and not [*tmp_path.iterdir()]
  on_processor('Unheard with AMX', 'avx512bf16')
  assert crossovers.crossover('bfloat16', 128, 64, True) == 0.2
  cache, = tmp_path.iterdir()
  assert 'amx' in cache.name
  monkeypatch.setattr(native, 'has_matrix_unit', lambda: False)
  on_processor('GenuineIntel with AMX', 'avx512bf16')
  assert crossovers.crossover('bfloat16', 128, 64, True) == 0.95


@pytest.mark.parametrize('structure, wanted', [
    (dict(structure='block', inputs=32, outputs=32), True),
    (dict(structure='block', inputs=16, outputs=32), False),
    (dict(structure='block', inputs=64, outputs=32, balanced=True), True),
    ('unstructured', False), ('2:4', False),
])
def test_blocks_are_recognized_in_the_structures_of_a_run(
    structure, wanted, monkeypatch
):
  seen = []
  monkeypatch.setattr(
      training.step.matmul, 'sparse_steps',
      lambda *args, in_blocks, **kwargs: seen.append(in_blocks),
  )
  sparsity = 0.5 if structure == '2:4' else 0.75
  run = tiny_run.make_run(
      model__d_model=64, model__d_ff=128,
      phases__pretrain__algorithm=dict(
          name='static', sparsity=sparsity, structure=structure
      ),
  )
  assert run.programs.storage == 'dense' and seen[-1] is wanted


@pytest.mark.parametrize('algorithm, uses_kernels', [
    (dict(name='static', sparsity=0.3), False),
    (dict(name='static', sparsity=0.75), True),
    (dict(name='gmp', sparsity=0.75, update_every=1, update_until=4), True),
    (dict(name='gmp', sparsity=0.3, update_every=1, update_until=4), False),
])
def test_a_plan_below_the_crossover_has_no_branch_to_kernels(
    algorithm, uses_kernels, on_processor
):
  on_processor('AuthenticAMD', 'avx512bf16')
  run = tiny_run.make_run(
      matmul='auto', model__d_model=64, model__d_ff=128,
      phases__pretrain__batch_size=8, phases__pretrain__algorithm=algorithm,
  )
  assert (run.programs.sparse_steps is not None) is uses_kernels


@pytest.mark.parametrize('algorithm, wanted', [
    (dict(name='partition', groups=[['*/mlp/*', BLOCKS], ['*', DENSE]]), True),
    (dict(name='partition', groups=[
        ['*/mlp/*', BLOCKS], ['*', dict(name='static', sparsity=0.5)]
    ]), False),
    (DENSE, True),
])
def test_a_partition_with_dense_groups_has_block_masks(algorithm, wanted):
  assert training.step.matmul.are_in_blocks([algorithm], 64) is wanted


def test_products_have_the_tokens_of_a_micro_batch(on_processor):
  on_processor('AuthenticAMD', 'avx512')
  uses_kernels = lambda micro_batches: tiny_run.make_run(
      matmul='auto', model__d_model=64, model__d_ff=128,
      micro_batches=micro_batches, phases__order=('pretrain',),
      phases__pretrain__batch_size=8,
      phases__pretrain__algorithm=dict(name='static', sparsity=0.75),
  ).programs.sparse_steps is not None
  assert uses_kernels(1) and not uses_kernels(4)


near = lambda *sparsities: lambda zeros: any(
    abs(zeros - sparsity) < 0.02 for sparsity in sparsities
)


@pytest.mark.parametrize('loses, wanted', [
    (lambda zeros: True, crossovers.NEVER), (lambda zeros: zeros < 0.45, 0.5),
    (near(), 0.3), (near(0.7), 0.8), (near(0.3, 0.6, 0.8), 0.9),
    (near(0.3, 0.95), crossovers.NEVER),
])
def test_kernels_are_used_beyond_the_last_sparsity_at_which_they_lose(
    monkeypatch, loses, wanted
):
  # Time advances by what products are assumed to take.
  clock = [0.0]
  monkeypatch.setattr(crossovers.time, 'perf_counter', lambda: clock[0])

  def finished(results):
    zeros = 1 - float((jnp.asarray(results[1]) != 0).mean())
    clock[0] += 2.0 if zeros < 0.1 or loses(zeros) else 1.0
    return results

  monkeypatch.setattr(jax, 'block_until_ready', finished)
  limit = crossovers.measure_crossover('float32', 64, 64)
  # Masks of exactly this sparsity use them, also if counts are rounded.
  assert wanted - 0.01 < limit < wanted or limit == wanted == crossovers.NEVER


def test_the_crossover_measured_on_this_machine_is_positive():
  limit = crossovers.measure_crossover('float32', 64, 64)
  assert 0 < limit <= crossovers.NEVER


@pytest.mark.parametrize('lines, wanted', [
    ('vendor_id\t: GenuineIntel\nflags\t: avx512_bf16 amx_bf16\n',
     'GenuineIntel with AMX'),
    ('vendor_id\t: GenuineIntel\ncpu family\t: 26\n', 'GenuineIntel'),
    ('vendor_id\t: AuthenticAMD\ncpu family\t: 25\n', 'AuthenticAMD'),
    ('vendor_id\t: AuthenticAMD\ncpu family\t: 26\n',
     'AuthenticAMD from Zen 5 on'),
    ('vendor_id\t: AuthenticAMD\n', 'AuthenticAMD'),
    ('', 'unknown'),
])
def test_the_name_of_a_processor_has_its_vendor_and_vector_instructions(
    monkeypatch, lines, wanted
):
  monkeypatch.setattr(processor, 'cpuinfo', lambda: lines)
  assert processor.vendor() == wanted


def test_blocks_are_refused_except_on_nvidia_gpus_and_tpus(monkeypatch):
  check = training.step.matmul.check_devices
  refuse("matmul is 'blocks-128', whose kernels", check, 'blocks-128', 1)
  monkeypatch.setattr(jax, 'default_backend', lambda: 'tpu')
  check('blocks-128', 1)
  refuse("skip blocks of 128; use 'blocks-128'", check, 'blocks-64', 1)
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  check('blocks-64', 1)
  client = types.SimpleNamespace(platform_version='PJRT C API\nrocm 60443484')
  monkeypatch.setattr(backends, 'get_backend', lambda: client)
  refuse("for NVIDIA's GPUs and TPUs, and this", check, 'blocks-64', 1)
  check('auto', 1)
