"""Numbers of measurements are those of committed records.

A table has a function that names the rows of records behind each of its cells.
Tables and records that are missing are listed with the reason.
"""

import functools
import json
import pathlib
import re
from typing import NamedTuple

import numpy as np
import pytest

from experiments.benchmarks import matmul
from spdf_jax.accelerator import native

ROOT = pathlib.Path(__file__).parents[2]
RESULTS = ROOT / 'experiments' / 'results'
README = 'README.md'
MEASURED = 'experiments/guides/measured.md'
PROFILES = 'experiments/guides/profiles.md'
DECODE = 'experiments/results/decode/README.md'
MATMUL = 'experiments/results/matmul/README.md'
HOSTS = 'experiments/guides/hosts.md'
SKIP_ZEROS = 'experiments/results/skip_zeros/README.md'
UPDATES = 'experiments/results/optimizer/README.md'

ZEN5, ZEN4, ZEN3 = (f'matmul/zen{generation}.json' for generation in '543')
INTEL = 'matmul/emerald-rapids.json'
DECODE_INTEL = 'decode/emerald-rapids.json'
PROFILES_INTEL = 'peers/profiles-emerald-rapids.json'
OPTIMIZER_ZEN4, OPTIMIZER_INTEL = (
    f'optimizer/{chip}.json' for chip in ('zen4', 'emerald-rapids')
)
STEPS, STEPS_ZEN3, AMX = (
    f'peers/{name}.json' for name in ('steps', 'zen3', 'amx')
)

WITHOUT_RECORD = {
    ZEN4: 'measured before rows of the suite matmul were committed',
    OPTIMIZER_ZEN4:
        'measured before rows of the suite optimizer were committed',
}
"""Records that are missing, and why. An entry goes when its record comes."""

TABLES_WITHOUT_RECORD = {
    (MEASURED, 'run'): 'results/quickstart/report.md has it, but no JSON',
    (MEASURED, 'algorithm'): 'reports of these runs were not kept',
    (MATMUL, 'dense step over sparse step, Zen 3'): 'see `WITHOUT_RECORD`',
    (MATMUL, 'blocks, over zeros anywhere'): 'see `WITHOUT_RECORD`',
    (MATMUL, 'dense over blocks of 32 × 32'): 'see `WITHOUT_RECORD`',
    (MEASURED, 'shapes'):
        'measured before rows of the suite primitives were committed',
}
"""Tables that no record has, by page and first heading, and why."""


class Source(NamedTuple):
  """A row of a record, or the ratio of two rows of one case."""

  record: str
  case: str
  metric: str
  over: str = ''
  field: str = 'value'


def with_interval(source):
  return [source._replace(field=field) for field in ('value', 'low', 'high')]


def percent(text):
  """Returns the zeros of a heading or label, `'75%'`, and what follows them."""
  if 'dense' in text:
    return '0%'
  return re.sub(r'ours, | zeros', '', text).replace(' %', '%')


# Sources of the tables of linear layers.


def layer(record, zeros, dtype='float32', dense='dense'):
  case = 'mean' if dtype == 'float32' else f'mean, {dtype}'
  return Source(record, case, f'{zeros} zeros: {dense} / native, wall')


def layer_in_blocks(record, zeros, dtype='bfloat16', tokens=1024):
  return Source(
      record, f'768 x 3072 and 3072 x 768 T {tokens}, blocks of 32',
      f'{zeros} zeros: dense {dtype} / native, wall',
  )


LAYERS = {
    ('Zen 5', 'float32'): functools.partial(layer, ZEN5),
    ('Zen 5', 'bfloat16'): functools.partial(layer, ZEN5, dtype='bfloat16'),
    ('Zen 4', 'float32'): functools.partial(layer, ZEN4),
    ('Zen 4', 'bfloat16'): functools.partial(layer, ZEN4, dtype='bfloat16'),
    ('Zen 3', 'float32'): functools.partial(layer, ZEN3),
    ('Intel', 'float32'): functools.partial(layer, INTEL),
    ('Intel', 'bfloat16'): functools.partial(
        layer, INTEL, dtype='bfloat16', dense='dense bfloat16'
    ),
    ('Intel', 'blocks'): functools.partial(layer_in_blocks, INTEL),
}


# Training steps over dense ones, of ours and of PyTorch.


def native_step(zeros, case='d_model 768, native', storage='compact'):
  """Returns the row of paired steps on the Zen 4, in float32."""
  metric = f'{zeros} zeros: dense step / {storage}, wall'
  return Source('peers/train_step.json', case, metric)


def our_step(dtype, zeros, where=''):
  return f'ours {dtype} {zeros} zeros{where}, wall ms'


def step_ratio(record, dtype, zeros, over='', where=''):
  """Returns the ratio of the medians of two steps, by default to dense."""
  return Source(
      record, 'width 768', over or our_step(dtype, '0%'),
      our_step(dtype, zeros, where),
  )


def step_in_blocks(zeros):
  return Source(
      AMX, 'width 768',
      f'{zeros} zeros in blocks: ours bfloat16 0% zeros / ours bfloat16',
  )


def pytorch_step(record, dtype, kind, zeros):
  return Source(
      record, 'width 768',
      f'{zeros} zeros: PyTorch {dtype} {kind} / ours {dtype}',
  )


OURS = {
    ('Zen 4', 'float32'): native_step,
    ('Zen 4', 'bfloat16'): functools.partial(step_ratio, STEPS, 'bfloat16'),
    ('Zen 3', 'float32'): functools.partial(step_ratio, STEPS_ZEN3, 'float32'),
    ('Intel', 'float32'): functools.partial(step_ratio, AMX, 'float32'),
    ('Intel', 'bfloat16'): functools.partial(step_ratio, AMX, 'bfloat16'),
    ('Intel', 'blocks'): step_in_blocks,
}
# The suite pairs PyTorch's step with our fastest one, which is that in float32
# on the Intel: for bfloat16 the tables have ratios of medians.
PYTORCHS = functools.partial(
    step_ratio, AMX, 'bfloat16', over='PyTorch bfloat16 compiled, wall ms'
)
PYTORCH = {
    ('Zen 4', 'float32'): functools.partial(
        pytorch_step, STEPS, 'float32', 'eager'
    ),
    ('Zen 4', 'bfloat16'): functools.partial(
        pytorch_step, STEPS, 'bfloat16', 'eager'
    ),
    ('Zen 3', 'float32'): functools.partial(
        pytorch_step, STEPS_ZEN3, 'float32', 'eager'
    ),
    ('Intel', 'float32'): functools.partial(
        pytorch_step, AMX, 'float32', 'compiled'
    ),
    ('Intel', 'bfloat16'): PYTORCHS,
    ('Intel', 'blocks'): functools.partial(PYTORCHS, where=' in blocks'),
}


def kind_of(text):
  """Returns the processor and the kernels that a label names."""
  dtype = re.search('bfloat16|float32', text)
  kernels = 'blocks' if 'blocks' in text else dtype[0]
  return re.search('Zen [345]|Intel', text)[0], kernels


# Sources of a cell, by its row, a dictionary of headings, and its heading.


def of_readme(row, heading):
  kinds = {'layers': LAYERS, 'step': OURS, 'PyTorch dense over ours': PYTORCH}
  name, _, percents = heading.partition(', ')
  source = kinds[name][kind_of(f'{row["processor"]}, {row["dtype"]}')]
  return [source(f'{share}%') for share in re.findall(r'\d+', percents)]


def of_layers(row, heading):
  return [LAYERS[kind_of(row['linear layer'])](percent(heading))]


def of_blocks(row, heading):
  dtype, zeros = next(iter(row.values())).split(', ')
  tokens = heading.removesuffix(' tokens').replace(',', '')
  return [layer_in_blocks(INTEL, percent(zeros), dtype, tokens)]


def of_speedups(row, heading):
  label = row['training step']
  zeros = percent(heading)
  if 'Zen 4' not in label:
    return [OURS[kind_of(label)](zeros)]
  case = 'quickstart' if 'quickstart' in label else 'd_model 768'
  storage = 'compact' if 'kept values only' in label else 'native'
  return [native_step(zeros, f'{case}, native', storage)]


def of_milliseconds(row, heading):
  dtype = row['dtype']
  kind = heading.removeprefix('PyTorch, ')
  metric = (
      f'PyTorch {dtype} {kind}, wall ms' if kind in ('eager', 'compiled')
      else our_step(dtype, percent(heading))
  )
  return [Source(STEPS, f'width {row["width"]}', metric)]


def of_pytorch(row, heading):
  kind = kind_of(row['dtype of both'])
  if kind == ('Intel', 'bfloat16') and 'dense' in heading:
    return [pytorch_step(AMX, 'bfloat16', 'compiled', '0%')]
  source = PYTORCH[kind](percent(heading))
  return [source] if kind[0] == 'Intel' else with_interval(source)


def of_overhead(row, heading):
  label = next(iter(row.values()))
  gpu = {'H200, GPT-2 Small': 'gpt2-small, cudnn attention, 16 x 1024 tokens',
         'H200, GPT-3 XL': 'gpt3-xl, cudnn attention, 8 x 2048 tokens'}
  if heading in gpu:
    return [Source('gpu/gpu.json', gpu[heading], 'static / dense')]
  case = {'0.74M': 'quickstart', '3.5M': 'd_model 256',
          '13.3M': 'd_model 512'}[heading.split()[0]]
  metric = {
      'whole training step': 'static step / dense, wall',
      'optimizer alone (clipping, AdamW)': 'static optimizer / dense, wall',
      'optimizer state copied by the compiled step':
          'static step: copied / optimizer state',
  }[label]
  return [Source('peers/train_step.json', case, metric)]


def of_updates(row, heading):
  name = {'GMP': 'gmp', 'GMP over the whole model': 'gmp, model wide',
          'SET': 'sparse_evolution', 'RigL': 'rigl', 'GraNet': 'granet',
          'RigL, balanced': 'rigl, balanced'}.get(heading, heading)
  chip = row['update of masks over a dense step']
  record = {'Zen 4': OPTIMIZER_ZEN4, 'Intel': OPTIMIZER_INTEL}[chip]
  return [
      Source(
          record, f'd_model 256, {name}', f'{name} step, update / dense, {time}'
      ) for time in ('wall', 'CPU')
  ]


def of_update_intervals(row, heading):
  name = next(iter(row.values()))
  when = {'between updates': 'between', 'with an update': 'update'}[heading]
  return with_interval(Source(
      OPTIMIZER_INTEL, f'd_model 256, {name}',
      f'{name} step, {when} / dense, wall',
  ))


def of_profiles(record, row, heading):
  zeros, _, where = percent(row['zeros']).partition(' ')
  case = (
      f'width {row.get("width", 768)}, {row.get("dtype", "bfloat16")}, '
      f'{zeros} zeros {where}'.rstrip()
  )
  metrics = {'step': 'step, wall ms', 'idle': 'idle, % of the cores'}
  return [Source(record, case, metrics.get(heading, f'{heading}, ms'))]


def of_decoding(record, row, heading):
  first, label = next(iter(row.items()))
  width = re.search(r'width (\d+)', f'{label} {first}')[1]
  number, unit = re.search(
      r'(\d+) (token|sequence)', f'{label}, 1 sequence'
  ).groups()
  products = 'hidden products, ' if unit == 'token' else ''
  case = f'width {width}, {products}{number} {unit}s'
  dtype = 'float32' if 'float32 values' in label else 'bfloat16'
  zeros = re.search(r'([\d.]+) %', heading) or re.search(r'([\d.]+) %', label)
  variant = (
      heading.replace(', ', ' ').replace(' ', ', ')
      if heading.startswith(('PyTorch', 'dense'))
      else f'{float(zeros[1]) / 100:.3g} zeros, {dtype}'
  )
  what = 'memory, MiB' if label.startswith('memory') else 'speed-up'
  source = Source(record, case, f'{variant}: {what}')
  if heading == 'target':
    return [source._replace(field='target')]
  if heading == 'earlier run':
    source = source._replace(record=f'decode/width_{width}.json')
  return with_interval(source) if heading.endswith(' run') else [source]


CHIPS = {f'Zen {n}': f'zen{n}' for n in '345'} | {'Intel': 'emerald-rapids'}


def of_skip_zeros(row, heading):
  """Reads processor, dtype and width in both headings, by default 512."""
  first, model = next(iter(row.items()))
  label = f'{first}, {heading}'
  chip = re.search(r'Zen \d|Intel', label)[0]
  width = re.search(r'width (\d+)', label)
  case = (
      f'{model}, d_model {width[1] if width else 512}, '
      f'{"bfloat16" if "bfloat16" in label else "float32"}'
  )
  return [
      Source(
          f'skip_zeros/{CHIPS[chip]}.json', case,
          f'{zeros} zeros: dense step / skip_zeros, wall',
      ) for zeros in ('50%', '75%', '90%')
  ]


def of_loop(row, heading):
  label = next(iter(row.values()))
  metric = (
      label if 'milliseconds' in label
      else '75% zeros: dense step / skip_zeros, wall'
  )
  chip = next(iter(row)).removeprefix("README's loop, ")
  record = f'skip_zeros/loop_{CHIPS[chip]}.json'
  source = Source(record, heading, metric)
  return [source] if 'milliseconds' in label else with_interval(source)


TABLES = {
    (README, 'processor'): of_readme,
    (MEASURED, 'linear layer'): of_layers,
    (MATMUL, 'Intel, two cores, dense over blocks of 32 × 32'): of_blocks,
    (MEASURED, 'training step'): of_speedups,
    (MEASURED, 'width'): of_milliseconds,
    (MEASURED, 'dtype of both'): of_pytorch,
    (MEASURED, 'static mask over dense'): of_overhead,
    (MEASURED, 'update of masks over a dense step'): of_updates,
    (UPDATES, 'Intel Xeon, Emerald Rapids'): of_update_intervals,
    (PROFILES, 'width'): functools.partial(of_profiles, 'peers/profiles.json'),
    (PROFILES, 'zeros'): functools.partial(of_profiles, PROFILES_INTEL),
    (DECODE, 'Intel, width 768'): functools.partial(of_decoding, DECODE_INTEL),
    (DECODE, 'Intel, width 2048'): functools.partial(of_decoding, DECODE_INTEL),
    (HOSTS, 'model'): of_skip_zeros,
    (SKIP_ZEROS, 'Zen 4, float32'): of_skip_zeros,
    (SKIP_ZEROS, 'Zen 4, bfloat16'): of_skip_zeros,
    (SKIP_ZEROS, 'Zen 5'): of_skip_zeros,
    (SKIP_ZEROS, 'Zen 3, float32'): of_skip_zeros,
    (SKIP_ZEROS, 'Intel, float32'): of_skip_zeros,
    (SKIP_ZEROS, 'Intel, bfloat16'): of_skip_zeros,
    (SKIP_ZEROS, "README's loop, Zen 5"): of_loop,
    (SKIP_ZEROS, "README's loop, Zen 3"): of_loop,
    (SKIP_ZEROS, "README's loop, Intel"): of_loop,
} | {
    table: functools.partial(of_decoding, 'decode/decode.json')
    for table in (
        (MEASURED, 'one step of generation'), (DECODE, 'width 768'),
        (DECODE, 'width 2048'), (DECODE, 'bfloat16 values'),
    )
}


def read_tables(page):
  """Yields rows and right-aligned headings of the tables of a page."""
  text = (ROOT / page).read_text()
  for block in re.findall(r'(?:^\|.*\n)+', text, re.M):
    headings, rule, *lines = (
        [cell.strip() for cell in line.strip('|\n').split('|')]
        for line in block.splitlines()
    )
    rows, first = [], ''
    for cells in lines:
      first = cells[0] or first  # Repeats the cell above.
      rows.append(dict(zip(headings, [first, *cells[1:]])))
    to_right = [h for h, line in zip(headings, rule) if line == '---:']
    if to_right:
      yield rows, to_right


PAGES = {
    (page, next(iter(rows[0]))): (rows, headings)
    for page in (
        README, MEASURED, PROFILES, MATMUL, DECODE, HOSTS, SKIP_ZEROS, UPDATES,
    )
    for rows, headings in read_tables(page)
}


@functools.cache
def read_rows(record):
  rows = json.loads((RESULTS / record).read_text())['rows']
  return {(row['case'], row['metric']): row for row in rows}


def recorded(source):
  rows = read_rows(source.record)
  value = rows[source.case, source.metric][source.field]
  if source.over:
    value /= rows[source.case, source.over]['value']
  return value


def test_every_table_of_numbers_has_sources_or_a_reason():
  assert TABLES.keys().isdisjoint(TABLES_WITHOUT_RECORD)
  assert PAGES.keys() == TABLES.keys() | TABLES_WITHOUT_RECORD.keys()


@pytest.mark.parametrize('table', TABLES, ids=' '.join)
def test_numbers_of_a_table_are_recorded(table):
  rows, headings = PAGES[table]
  wrong = []
  for row in rows:
    for heading in headings:
      numbers = re.findall(r'\d[\d,.]*', row[heading])
      if not numbers:
        continue
      sources = TABLES[table](row, heading)
      assert len(sources) == len(numbers), (row, heading)
      for number, source in zip(numbers, sources):
        if source.record in WITHOUT_RECORD:
          continue
        digits = len(number.partition('.')[2])
        value = f'{recorded(source):,.{digits}f}'
        if value.replace(',', '') != number.replace(',', ''):
          wrong.append(f'{number} is {value}: {source}')
  assert wrong == []


def test_records_that_are_called_missing_are_missing():
  # Once a record exists, its entry must go, so that its numbers are compared.
  assert [r for r in WITHOUT_RECORD if (RESULTS / r).exists()] == []


@pytest.mark.skipif(
    not native.is_available('bfloat16'), reason='no kernels for bfloat16 here'
)
def test_the_matmul_suite_writes_all_rows_of_the_table_of_layers():
  rng = np.random.default_rng(0)
  rows = []
  for dtype in ('float32', 'bfloat16'):
    rows += matmul.measure_layers([matmul.Layer(32, 64)], [8], 1, rng, dtype)
  layers = [matmul.Layer(32, 64), matmul.Layer(64, 32)]
  rows += matmul.measure_blocks(layers, 8, 1, rng, 'bfloat16')
  widths = '32 x 64 and 64 x 32 T 8', '768 x 3072 and 3072 x 768 T 1024'
  written = {(row.case.replace(*widths), row.metric) for row in rows}
  for source in LAYERS.values():
    for zeros in ('75%', '90%'):
      assert (source(zeros).case, source(zeros).metric) in written
