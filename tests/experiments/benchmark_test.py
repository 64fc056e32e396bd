"""The benchmark command, its suites on small cases, and its statistics."""

import dataclasses
import itertools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.benchmarks import auto
from experiments.benchmarks import compiled
from experiments.benchmarks import decode
from experiments.benchmarks import machine
from experiments.benchmarks import matmul
from experiments.benchmarks import measuring
from experiments.benchmarks import model
from experiments.benchmarks import optimizer
from experiments.benchmarks import other_gpts
from experiments.benchmarks import primitives
from experiments.benchmarks import profiles
from experiments.benchmarks import pytorch
from experiments.benchmarks import skip_zeros
from experiments.benchmarks import small_gpts
from experiments.benchmarks import Suite
from experiments.benchmarks import SUITES
from experiments.benchmarks import topk
from experiments.benchmarks import train_step
import spdf_jax as spdf
from spdf_jax import models
from spdf_jax import training
from spdf_jax.accelerator import crossovers
from spdf_jax.accelerator import native
from spdf_jax.accelerator import processor
from spdf_jax.costs.flops import training_flops
from spdf_jax.evaluation import CachedModel
from tests import command
from tests.sparse_params import make_sparse_params

SMALL = small_gpts.Case(
    'small',
    dict(
        n_layers=1, n_heads=2, d_model=32, d_ff=64, vocab_size=64, max_length=8
    ),
    batch_size=2, length=8, steps=3, updates=3,
)


def measure_toy(repeats, rng):
  samples = np.linspace(1, 2, repeats)
  yield measuring.sampled_row('toy', 'ratio', samples, rng, target=3)
  yield measuring.counted_row('toy', 'bytes', 5, target=6)
  yield measuring.counted_row('other', 'seconds', 7)


def measure_too_slow(repeats, rng):
  samples = np.linspace(1, 2, repeats)
  yield measuring.sampled_row('toy', 'ratio', samples, rng, target=0.5)


@pytest.fixture(autouse=True)
def toys(monkeypatch):
  monkeypatch.setitem(SUITES, 'toy', Suite(measure_toy, 9))
  monkeypatch.setitem(SUITES, 'too-slow', Suite(measure_too_slow, 9))


def run(**values):
  return command.run(
      'benchmark', *(f'--{name}={value}' for name, value in values.items())
  )


def test_table_and_output_have_the_machine_the_rows_and_their_verdicts(
    tmp_path
):
  path = tmp_path / 'rows.json'
  status, out, _ = run(suite='toy', output=path, repeats=5)
  assert status == 0
  assert 'processor' in out and 'jax' in out
  heading, *table = out.split('\n\n')[1].splitlines()
  assert [line.split()[:3] for line in table] == [
      ['toy', 'ratio', '1.5'], ['toy', 'bytes', '5'], ['other', 'seconds', '7']
  ]
  assert [line[heading.index('verdict'):] for line in table] == ['ok', 'ok', '']
  report = json.loads(path.read_text())
  assert report['suite'] == 'toy' and report['repeats'] == 5
  assert report['machine']['cores'] >= 1
  assert [row['metric'] for row in report['rows']] == [
      'ratio', 'bytes', 'seconds'
  ]
  first = report['rows'][0]
  assert first['low'] < first['value'] == 1.5 < first['high'] < first['target']
  assert first['verdict'] == 'ok' and first['at_most'] is True
  assert report['rows'][2]['target'] is None


def test_generations_of_a_processor_have_different_descriptions(monkeypatch):
  text = 'cpu family\t: {}\nmodel\t\t: {}\nmodel name\t: AMD EPYC\n'
  names = []
  for family, number in ((25, 17), (26, 2)):
    cpuinfo = text.format(family, number)
    monkeypatch.setattr(processor, 'cpuinfo', lambda text=cpuinfo: text)
    names.append(machine.describe_machine()['processor'])
  assert names == [
      'AMD EPYC (family 25, model 17)', 'AMD EPYC (family 26, model 2)'
  ]


def test_only_a_target_missed_for_sure_exits_1(tmp_path):
  assert run(suite='too-slow').status == 1
  path = tmp_path / 'rows.json'
  assert run(suite='too-slow', repeats=1, output=path).status == 0
  row, = json.loads(path.read_text())['rows']
  assert row['verdict'] == 'undecided' and row['low'] is row['high'] is None


def test_an_output_without_a_directory_is_refused_before_measuring(
    tmp_path, monkeypatch
):
  def never(repeats, rng):
    raise AssertionError('measured')

  monkeypatch.setitem(SUITES, 'toy', Suite(never, 1))
  assert run(suite='toy', output=tmp_path / 'no' / 'rows.json').status == 1
  assert run(suite='toy', output=tmp_path).status == 1


SUITES_OF_CASES = {
    'topk': lambda rng: topk.measure_shape((64, 128), 3, rng),
    'primitives': lambda rng: primitives.measure_case(
        primitives.Case(4, 6, 5, 'float32', 2), 3, rng
    ),
    'train_step': lambda rng: train_step.measure_case(SMALL, 1, rng),
    'model': lambda rng: model.measure_step(SMALL, 1, rng),
    'generation': lambda rng: model.measure_generation(SMALL, 1, rng),
    'optimizer': lambda rng: optimizer.measure_case(
        SMALL, 1, rng, {'iterative': optimizer.ALGORITHMS['iterative']}
    ),
}


@pytest.mark.process
@pytest.mark.parametrize('suite, ratios', [
    ('topk', ('argsort / mask_from_scores', 'argsort of uniforms / random_ma')),
    ('primitives', ('primitive forward / ein', 'primitive gradient / einsum')),
    ('train_step', ('static step / dense', 'phases optimizer / dense')),
    ('model', ('our step / plain',)),
    ('generation', ('token 6 / token 2',)),
    ('optimizer', ('iterative optimizer, between', 'iterative step, update')),
])
def test_a_suite_measures_ratios_and_meets_its_targets_of_bytes_and_counts(
    suite, ratios, monkeypatch
):
  monkeypatch.setattr(model, '_EARLY', 2)
  monkeypatch.setattr(model, '_LATE', 6)
  monkeypatch.setattr(model, 'TOKENS', 2)
  rows = list(SUITES_OF_CASES[suite](np.random.default_rng(0)))
  assert all(math.isfinite(row.value) for row in rows)
  assert all(row.low <= row.value <= row.high for row in rows)
  counted = [r for r in rows if r.low == r.high and 'seconds' not in r.metric]
  aimed = [row for row in counted if row.target is not None]
  assert {measuring.verdict(row) for row in aimed} == {'ok'}
  for ratio in ratios:
    measured = [row for row in rows if row.metric.startswith(ratio)]
    assert measured and any(row.target is not None for row in measured)
  if suite == 'topk':
    differ = [row.value for row in rows if 'differ from argsort' in row.metric]
    assert differ == [0, 0]


@pytest.mark.process
def test_the_gpu_suite_compares_masks_with_dense_steps(monkeypatch):
  rng = np.random.default_rng(0)
  monkeypatch.setattr(profiles, 'PRODUCT', 16)
  monkeypatch.setattr(profiles, 'STEPS', (SMALL._replace(
      model=SMALL.model | dict(dtype='bfloat16', remat='full'),
  ),))
  monkeypatch.setattr(profiles, 'GENERATION', (SMALL,))
  monkeypatch.setattr(model, 'TOKENS', 2)
  monkeypatch.setattr(topk, 'SHAPE', (16, 32))
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  rows = {(r.case, r.metric): r for r in profiles.measure_gpu(3, rng)}
  step = {metric: row.value for (case, metric), row in rows.items()
          if case == 'small'}
  assert step['static: tokens/s'] == pytest.approx(
      16e3 / step['static: ms'], rel=1e-6
  )
  peak = 1e12 * rows['bfloat16 products of 16 x 16', 'TFLOP/s'].value
  flops = SMALL.batch_size * training_flops(
      models.GPTConfig(**SMALL.model), SMALL.length
  )
  assert step['dense: share of the peak, %'] == pytest.approx(
      1e5 * flops / step['dense: ms'] / peak
  )
  assert rows['small', 'static / dense'].target == 1.02
  assert step['RigL, an update / a step between'] > 0
  for peer in ('argsort', 'lax.top_k'):
    assert rows['masks of 16 x 32 scores', f'entries that differ from {peer}'
                ].value == 0


def test_the_gpu_suite_requests_a_gpu():
  status, _, log = run(suite='gpu')
  assert status == 1 and 'needs a GPU, and jax uses a cpu' in log


def test_timed_steps_share_a_state_and_have_clock_and_gradients_of_their_own():
  seen = []

  def step(state, argument):
    clock = state.opt_state
    seen.append((int(clock.count), bool(clock.dense_grads), int(argument[0])))
    return state, argument

  algorithm = spdf.rigl(0.5, update_every=10, update_until=50)
  params = {'w': jnp.ones((4, 4))}
  sparse = spdf.sparsify(optax.sgd(0.1), algorithm, key=0)
  state = training.create_state(params, sparse)
  argument = jnp.arange(3)
  program = compiled.Program(step, state, argument, step, lambda: 1, 0.0)
  at, after = optimizer.repeated_at(program, algorithm, (20, 21), calls=2)
  at(), after(), at(), after()
  assert seen == [(20, True, 0), (21, False, 2)] * 2


@pytest.mark.skipif(not native.is_available(), reason='no native kernels here')
@pytest.mark.process
def test_native_suites_compare_every_sparsity_with_dense(monkeypatch):
  rng = np.random.default_rng(0)
  targets = {'float32': {0.5: 1.45, 0.9: 5.0}, 'bfloat16': {0.9: 6.5}}
  monkeypatch.setattr(matmul, 'SPEEDUPS', targets)
  monkeypatch.setattr(matmul, 'IN_BLOCKS', {0.9: 3.5})
  monkeypatch.setattr(train_step, 'NATIVE_SPEEDUPS', {0.9: 2.1})
  rows = [*train_step.measure_native(SMALL, 1, rng)]
  assert len(rows) == 1 + 5
  for dtype in filter(native.is_available, targets):
    rows += matmul.measure_layers((matmul.Layer(16, 8),), (4,), 1, rng, dtype)
    means = [row for row in rows if row.case.startswith('mean')]
    assert all(
        any(f'{sparsity:.0%} zeros' in row.metric for row in means)
        for sparsity in targets[dtype]
    )
    for tokens in (8, 1024):
      row, = matmul.measure_blocks(
          (matmul.Layer(64, 64),), tokens, 1, rng, dtype
      )
      has_target = dtype == 'bfloat16' and native.has_matrix_unit()
      assert (row.target is None) != (has_target and tokens == 1024)
      rows.append(row)
  assert all(row.value > 0 for row in rows)


@pytest.mark.process
def test_the_suite_of_readme_s_loop_measures_dense_over_sparse_steps():
  rng = np.random.default_rng(0)
  dense, ratio = skip_zeros.measure_loop(1, rng, sizes=(16,))
  assert dense.metric == skip_zeros.DENSE and dense.value > 0
  assert ratio.value > 0 and ratio.target == skip_zeros.LEAST


@pytest.mark.process
@pytest.mark.parametrize('name', [*other_gpts.GPTS, skip_zeros.OURS])
def test_the_skip_zeros_suite_measures_models_of_others(name, monkeypatch):
  if name == 'Equinox':
    pytest.importorskip('equinox')
  monkeypatch.setattr(skip_zeros, 'SPARSITIES', (0.75,))
  sizes = other_gpts.Sizes(64, layers=1, vocabulary=32)
  dense, row = skip_zeros.measure_model(
      name, sizes, (2, 32), 3, np.random.default_rng(0)
  )
  assert dense.metric == skip_zeros.DENSE and dense.value > 0
  assert row.value > 0 and row.target == skip_zeros.LEAST


@pytest.mark.skipif(not native.is_available(), reason='no native kernels here')
@pytest.mark.slow
def test_the_auto_suite_covers_both_sides_of_the_crossover(monkeypatch):
  monkeypatch.setattr(auto, 'SPARSITIES', (0.1, 0.99))
  kernels = processor.vendor(), native.kernels()
  monkeypatch.setitem(crossovers.MEASURED, kernels, 0.75)
  rows = [*auto.measure_width(64, 'float32', 1, np.random.default_rng(0))]
  assert [row.metric[:3] for row in rows] == ['0% ', '76%', '99%']
  assert all(row.value > 0 and row.target == auto.LEAST for row in rows)
  ax, _ = auto.plot(rows).axes
  assert [x for line in ax.lines[:2] for x in line.get_xdata()] == [76, 99, 0]
  monkeypatch.setitem(crossovers.MEASURED, kernels, crossovers.NEVER)
  row, = auto.measure_width(64, 'float32', 1, np.random.default_rng(0))
  assert row.metric.startswith('0% ')


@pytest.mark.skipif(not native.is_available(), reason='no native kernels here')
@pytest.mark.process
def test_the_decode_suite_compares_listed_models_with_dense_ones(monkeypatch):
  monkeypatch.setattr(decode, 'SPARSITIES', (0.75,))
  monkeypatch.setattr(decode, 'BATCH_SIZES', (2,))
  case = decode.Case(16, 2, n_layers=1, vocab_size=40)
  rows = list(decode.measure_case(case, 3, np.random.default_rng(0)))
  products = [row for row in rows if 'hidden' in row.case]
  assert [row.metric for row in products] == 2 * [
      '0.75 zeros, float32: speed-up', '0.75 zeros, bfloat16: speed-up'
  ]
  if native.kernels() == 'avx512':
    assert [row.target for row in products] == [None, 3.0, None, 1.6]
  values = {row.metric: row.value for row in rows if 'sequences' in row.case}
  memory = [
      values[f'{name}: memory, MiB'] for name in (
          'dense, float32', '0.75 zeros, float32', '0.75 zeros, bfloat16',
      )
  ]
  assert memory == sorted(memory, reverse=True) and memory[-1] > 0
  assert all(value > 0 for value in values.values())


def test_without_pytorch_the_peers_are_skipped_with_a_warning(monkeypatch):
  monkeypatch.setattr(pytorch, 'is_installed', lambda: False)
  status, _, log = run(suite='peers')
  assert status == 0 and log.strip() == pytorch.MISSING


@pytest.mark.slow
def test_the_first_losses_of_pytorch_and_ours_are_equal():
  pytest.importorskip('torch', reason='torch is not installed')
  rows = list(pytorch.measure_case(SMALL, 3, np.random.default_rng(0)))
  differences = [row for row in rows if 'difference' in row.metric]
  assert len(differences) == 3 * len(machine.dtypes())
  assert {measuring.verdict(row) for row in differences} == {'ok'}
  blocks = 3 * ('bfloat16' in machine.dtypes())
  steps = [row for row in rows if 'wall ms' in row.metric]
  assert len(steps) == 5 * len(machine.dtypes()) + blocks
  ratios = [row for row in rows if 'in blocks: ' in row.metric]
  assert len(ratios) == blocks and all(row.value > 0 for row in ratios)


@pytest.mark.skipif(not native.is_available(), reason='no native kernels here')
@pytest.mark.process
def test_profiles_assign_the_time_of_a_step_to_its_parts(monkeypatch):
  monkeypatch.setattr(profiles, 'SPARSITIES', (0.0, 0.75))
  monkeypatch.setattr(machine, 'dtypes', lambda: ('float32',))
  rows = list(profiles.measure_parts_of(SMALL, 1, np.random.default_rng(0)))
  dense, sparse = (
      {row.metric: row.value for row in rows if f'{zeros} zeros' in row.case}
      for zeros in ('0%', '75%')
  )
  assert dense['sparse kernels, ms'] == 0 < dense['dense products, ms']
  assert all(sparse[f'{part}, ms'] > 0 for part in profiles.PARTS)
  assert 0 <= sparse['idle, % of the cores'] < 100


def noisy_seconds(rng, ratio, n):
  """Two programs under shared disturbances, with some bursts on one alone."""
  shared = 0.1 * rng.lognormal(sigma=0.5, size=n)
  own = rng.lognormal(sigma=0.05, size=(2, n))
  bursts = np.where(rng.random((2, n)) < 0.1, 3.0, 1.0)
  return shared * own * bursts * np.array([[1.0], [ratio]])


def test_the_interval_covers_the_known_ratio_about_95_times_in_100():
  rng = np.random.default_rng(1)
  covered = 0
  for _ in range(200):
    seconds = noisy_seconds(rng, 1.2, 25)
    _, low, high = measuring.median_interval(seconds[1] / seconds[0], rng)
    covered += low <= 1.2 <= high
  assert 180 <= covered < 200


@pytest.mark.parametrize(
    ('low', 'high', 'at_most', 'expected'),
    [
        (0.9, 1.0, True, 'ok'),  # The target itself is ok.
        (0.9, 1.1, True, 'undecided'),
        (1.01, 1.1, True, 'missed'),
        (1.0, 1.1, False, 'ok'),
        (0.9, 0.99, False, 'missed'),
        (math.nan, math.nan, True, 'undecided'),
    ],
)
def test_a_verdict_needs_the_whole_interval(low, high, at_most, expected):
  row = measuring.Row('a', 'b', (low + high) / 2, 1.0, low, high, at_most)
  assert measuring.verdict(row) == expected


def test_timed_calls_alternate_after_their_warm_ups():
  order = []
  calls = [lambda name=name: order.append(name) for name in 'ab']
  measuring.interleave(calls, 3, warmups=2)
  assert ''.join(order) == 'abab' + 'ababab'


def test_seconds_are_those_of_the_timed_calls_on_both_clocks():
  now = dict(wall=0.0, cpu=0.0)
  numbers = itertools.count()

  def call(wall, cpu):
    now['wall'] += wall
    now['cpu'] += cpu
    return next(numbers)

  timings = measuring.interleave(
      [lambda: call(2, 3), lambda: call(5, 7)],
      4,
      wall=lambda: now['wall'],
      cpu=lambda: now['cpu'],
  )
  np.testing.assert_array_equal(timings.wall, [[2] * 4, [5] * 4])
  np.testing.assert_array_equal(timings.cpu, [[3] * 4, [7] * 4])
  assert timings.results == [8, 9]


CONFIG = models.GPTConfig(
    vocab_size=40, n_layers=2, n_heads=2, d_model=16, d_ff=64, max_length=12
)


@pytest.mark.slow
@pytest.mark.parametrize('dtype, tolerance', [
    ('float32', 1e-5), ('bfloat16', 5e-2)
])
def test_pytorch_decodes_the_same_model(dtype, tolerance):
  pytest.importorskip('torch')
  params, _ = make_sparse_params(CONFIG, 0.5)
  decoder = CachedModel(models.model_of(
      dataclasses.replace(CONFIG, dtype='float32')
  ))
  cache = decoder.create_cache(3, 12)
  wanted, _ = decoder(
      params, cache, jnp.zeros((3, 1), jnp.int32), jnp.full((3, 1), 5)
  )
  tensors = pytorch.convert(params, dtype)
  # As `torch.nn.functional.linear` reads them fastest.
  assert all(x.is_contiguous() for x in jax.tree.leaves(tensors))
  step = pytorch.decoding(CONFIG, tensors, 3, context=5, length=12)
  for _ in range(2):  # A step leaves the cache as it is for the next one.
    logits = step().float().numpy()
    scale = np.abs(wanted).max()
    np.testing.assert_allclose(
        logits, np.asarray(wanted)[:, 0], rtol=0, atol=tolerance * scale
    )
