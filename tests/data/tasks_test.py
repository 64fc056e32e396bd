"""Tasks from files and docstrings: sizes, contexts, references, bad input."""

import functools
import json
import logging
import os

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from spdf_jax import data
from spdf_jax.data import stdlib
from spdf_jax.data import tasks
from spdf_jax.data.stdlib import module_split
from spdf_jax.data.tasks import format_sizes
from spdf_jax.data.tasks import Input
from spdf_jax.data.tasks import merge_equal_contexts
from spdf_jax.data.tasks import Pair
from spdf_jax.data.tasks import task_of_inputs
from spdf_jax.data.tasks.data_to_text import linearize_slots
from tests.real_data import data_path
from tests.refusals import refuse

TRIPLE = dict(subject='A', property='inPart', object='"B, c"')


def sizes(task, part=None):
  return {
      split: (
          sum(len(entry.references) for entry in chosen), len(chosen)
      )
      for split in ('train', 'validation', 'test')
      for chosen in [[
          entry for entry in task.inputs_of(split) if part in (None, entry.part)
      ]]
  }


def test_real_e2e_has_the_sizes_of_hu_et_al():
  assert sizes(data.load_task('e2e', data_path('e2e'))) == {
      'train': (42_061, 4_862), 'validation': (4_672, 547),
      'test': (4_693, 630),
  }


def test_contexts_of_e2e_tables_are_those_of_hu_et_al():
  files = data.load_task('e2e', data_path('e2e'))
  tables = data.load_task('e2e_csv', data_path('e2e'))
  for split in ('validation', 'test'):
    ours, theirs = tables.inputs_of(split), files.inputs_of(split)
    assert [i.context for i in ours] == [i.context for i in theirs]
    assert [len(i.references) for i in ours] == [
        len(i.references) for i in theirs
    ]


def test_real_webnlg_has_the_sizes_of_the_challenge():
  task = data.load_task('webnlg', data_path('webnlg17'))
  actual = sizes(task)
  assert {split: actual[split][0] for split in actual} == {
      'train': 18_025, 'validation': 2_258, 'test': 4_928
  }
  assert sizes(task, 'seen')['test'] == (2_495, 971)
  assert sizes(task, 'unseen')['test'] == (2_433, 891)


def test_real_dart_has_the_sizes_of_its_version():
  task = data.load_task('dart', data_path('dart'))
  assert sizes(task)['validation'] == (6_980, 2_768)
  assert sizes(task)['test'] == (12_552, 5_097)
  merged = merge_equal_contexts(task.inputs_of('test'))
  assert len(merged) == 4_159
  assert sum(len(entry.references) for entry in merged) == 12_552


def test_dart_smoke_trains_on_nine_tenths_of_dev():
  smoke = data.load_task('dart_smoke', data_path('dart'))
  dart = data.load_task('dart', data_path('dart'))
  assert set(smoke.train + smoke.validation) == set(dart.validation)
  assert len(smoke.inputs_of('train')) + len(smoke.inputs_of('validation')) == (
      2_768
  )
  assert smoke.test == dart.test


def write(folder, files):
  for name, text in files.items():
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding='utf-8')
  return folder


def test_cleaned_e2e_tables_are_read(tmp_path):
  table = 'mr,ref,orig_mr\n"name[A], near[B, C]","A, near B, C.",x\n'
  write(tmp_path, {
      'train-fixed.no-ol.csv': '\ufeff' + table,
      'devel-fixed.no-ol.csv': table, 'test-fixed.csv': table,
  })
  task = data.load_task('e2e', tmp_path)
  assert task.train == task.validation == task.test == (
      Pair('name : A | near : B, C', 'A, near B, C.'),
  )


def xml_entry(category, comment='good'):
  return f'''<benchmark><entries><entry category="{category}" eid="Id1">
      <originaltripleset><otriple>A | x | B</otriple></originaltripleset>
      <modifiedtripleset><mtriple>A | inPart | "B, c"</mtriple>
      <mtriple>A | n | 1</mtriple></modifiedtripleset>
      <lex comment="{comment}" lid="Id1">A is in B.</lex>
      <lex comment="bad" lid="Id2">B?</lex></entry></entries></benchmark>'''


def webnlg_json(category):
  triples = [TRIPLE, dict(subject='A', property='n', object='1')]
  entry = dict(
      category=category, size='2', modifiedtripleset=triples,
      lexicalisations=[
          dict(comment='good', lex='A is in B.', xml_id='Id1'),
          dict(comment='bad', lex='B?', xml_id='Id2'),
      ],
  )
  return json.dumps({'entries': [{'1': entry}]})


def webnlg_line(category):
  return json.dumps(dict(
      category=category, triples=[['A', 'inPart', '"B, c"'], ['A', 'n', 1]],
      lexs=[dict(comment='good', text='A is in B.'),
            dict(comment='bad', text='B?')],
  ))


@pytest.mark.parametrize('files', [
    {'train/2triples/Food.xml': xml_entry('Food'),
     'test/x.xml': xml_entry('Athlete')},
    {'train.xml': xml_entry('Food'),
     'testdata_with_lex.xml': xml_entry('Athlete')},
    {'train.json': webnlg_json('Food'), 'test.json': webnlg_json('Athlete')},
    {'train.jsonl': webnlg_line('Food'), 'test.jsonl': webnlg_line('Athlete')},
])
def test_webnlg_is_the_same_in_every_format(tmp_path, files):
  task = data.load_task('webnlg', write(tmp_path, files))
  context = 'A : inPart : "B, c" | A : n : 1'
  assert task.inputs_of('test') == (Input(context, ('A is in B.',), 'unseen'),)
  assert task.train == (Pair(context, 'A is in B.'),)


def test_dart_relations_are_lower_cased(tmp_path):
  text = json.dumps([dict(
      tripleset=[['A', 'IS_IN', 'B'], ['B', 'At', 'C']],
      annotations=[dict(source='x', text='t'), dict(source='x', text='u')],
  )])
  task = data.load_task('dart', write(tmp_path, {'train.json': text}))
  assert task.train == (
      Pair('A : is_in : B | B : at : C', 't'),
      Pair('A : is_in : B | B : at : C', 'u'),
  )


def test_curation_drops_empty_texts_and_splits_deterministically(tmp_path):
  rows = ''.join(f'"S, {i}",url,"Line\nof {i}"\n' for i in range(51))
  write(tmp_path, {
      'curation-corpus-base-with-articles.csv':
          'summary,url,article_content\n' + rows + 'S,u,\n,u,A\n" ",u,A\n',
  })
  task = data.load_task('curation', tmp_path)
  assert [len(task.train), len(task.validation), len(task.test)] == [41, 5, 5]
  pairs = task.train + task.validation + task.test
  assert set(pairs) == {Pair(f'Line\nof {i}', f'S, {i}') for i in range(51)}
  assert data.load_task('curation', tmp_path) == task


def test_own_json_lines_are_read_as_pairs(tmp_path):
  write(tmp_path, {
      'train.jsonl': '{"context": "c", "target": "t"}\n\n',
      'test.jsonl': '{"context": "c", "references": ["t", "u"], "part": "p"}',
  })
  task = data.load_task('jsonl', tmp_path)
  assert task.train == (Pair('c', 't'),)
  assert task.inputs_of('test') == (Input('c', ('t', 'u'), 'p'),)
  assert '  p' in format_sizes(task)


def test_only_the_completion_and_its_end_count_in_the_loss(tmp_path):
  write(tmp_path, {'train.txt': 'name : A||A is .\n'})
  task = data.load_task('e2e', tmp_path)
  examples = data.encode_pairs(task.train, data.ByteTokenizer(), max_length=64)
  batch = examples.read(
      np.array([0]), np.array([0]), block_length=63, length=63
  )
  counted = batch.targets[batch.weights > 0].tolist()
  assert counted == [*b' A is .', 256]
  first = int(np.argmax(batch.weights[0]))
  assert batch.inputs[0, :first + 1].tolist() == [*b'name : A', 256]


@given(st.dictionaries(
    st.text('abc', min_size=1), st.text('de £-', min_size=1), min_size=1
))
def test_every_slot_and_value_is_in_the_context(slots):
  meaning = ', '.join(f'{name}[{value}]' for name, value in slots.items())
  context = linearize_slots(meaning)
  assert len(context.split(' | ')) == len(slots)
  squeezed = lambda text: text.replace(' ', '')
  for part, (name, value) in zip(context.split(' | '), slots.items()):
    assert squeezed(part) == squeezed(f'{name}:{value}')


@pytest.mark.parametrize('name, files, message', [
    ('e2e', {'x.txt': ''}, 'has none of the files trainset.csv'),
    ('e2e', {'train.txt': 'a||b\nno bars'}, r'line 2 of .*train.txt has no'),
    ('e2e', {'devset.csv': 'mr,text\n'}, "devset.csv has no column 'ref'"),
    ('e2e', {'devset.csv': 'mr,ref\nA,b'}, "'A' has no slot"),
    ('e2e', {'testset.csv': 'MR\nname[A]'}, 'no references; use testset_w'),
    ('webnlg', {'test.xml': '<entries>'}, 'test.xml cannot be read'),
    ('webnlg', {'test.json': '[1]'}, 'test.json cannot be read .TypeError'),
    ('webnlg', {'test.json': '{"entries": ['},
     'test.json cannot be read .JSON'),
    ('webnlg', {'test.jsonl': '{"category": "Food"}'}, "line 1 .*'triples'"),
    ('webnlg', {'test.xml': xml_entry('Food', 'bad')},
     'none of the 1 inputs of the test split .* has a reference'),
    ('dart', {'test.json': '{}'}, 'none of the 0 inputs|holds no input'),
    ('dart', {'test.json': '[{"tripleset": [["a", "b"]]}]'},
     'test.json entry 0 cannot be read'),
    ('dart', {'dev.json': '[{"tripleset": [], "annotations": [{"text": 1}]}]'},
     'dev.json entry 0 cannot be read .TypeError'),
    ('dart_smoke', {'test.json': '[]'}, 'which dart_smoke trains on'),
    ('curation', {'a.csv': ''}, 'none of the files curation-corpus-base'),
    ('jsonl', {'train.jsonl': '{"context": "a", "target": "\\ud800"}'},
     'train.jsonl line 1 cannot be read .Unicode'),
    ('jsonl', {'train.jsonl': '[]'}, 'line 1 cannot be read'),
    ('jsonl', {'train.jsonl': '{"context": "a", "references": "b"}'},
     'line 1 cannot be read .TypeError'),
    ('jsonl', {'train.jsonl': '\n'}, 'holds no input'),
])
def test_bad_files_are_refused_in_one_sentence(tmp_path, name, files, message):
  write(tmp_path, files)
  refuse(message, data.load_task, name, tmp_path)


def test_broken_utf8_and_a_missing_folder_are_named(tmp_path):
  (tmp_path / 'train.txt').write_bytes(b'a||b\xff')
  load = functools.partial(data.load_task, 'e2e')
  refuse('train.txt cannot be read .*position 4', load, tmp_path)
  refuse("task 'e2e' is read from files", load)
  refuse('nowhere.* is not a folder', load, tmp_path / 'nowhere')


def test_single_inputs_without_a_reference_are_left_out_with_a_warning(caplog):
  bare, good = Input('a', ()), Input('b', ('c',))
  with caplog.at_level(logging.WARNING):
    task = task_of_inputs('toy', {'train': [bare, good]})
  assert task.inputs_of('train') == (good,)
  assert 'Skipped 1 inputs of the train split' in caplog.text


def test_the_fingerprint_of_a_task_depends_on_how_references_are_grouped():
  one = task_of_inputs('toy', {'test': [Input('a', ('b', 'c'))]})
  split = [Input('a', ('b',)), Input('a', ('c',))]
  two = task_of_inputs('toy', {'test': split})
  assert one.test == two.test
  assert one.fingerprint != two.fingerprint


@pytest.fixture(scope='module')
def task():
  return tasks.load_task('python-docstrings')


def test_docstrings_are_thousands_of_pairs_in_the_splits_of_their_modules(task):
  splits = {s: getattr(task, s) for s in ('train', 'validation', 'test')}
  pairs = [pair for split in splits.values() for pair in split]
  assert 5_000 < len(pairs) < 8_000
  assert len(task.train) > 0.85 * len(pairs)
  assert min(map(len, splits.values())) > 0.03 * len(pairs)
  assert len({pair.context for pair in pairs}) == len(pairs)
  for split, examples in splits.items():
    for context, target in examples:
      assert module_split(context.split(' ')[0]) == split
      assert target and target == target.strip()
      assert len(target.splitlines()) == 1


def test_functions_methods_and_coroutines_are_read():
  source = '''
import sys
def plain(a, *, b: int = 2) -> str:
  """Does it."""
class Outer:
  """Is no function."""
  class Inner:
    async def method(self, item):
      """
      Waits for `item`.

      And more.
      """
      def helper():
        "Helps."
if sys.platform == 'win32':
  def guarded(): "Guards."
'''
  assert tasks.docstring_pairs('pkg.mod', source) == [
      tasks.Pair('pkg.mod plain(a, *, b: int=2) -> str', 'Does it.'),
      tasks.Pair('pkg.mod Outer.Inner.method(self, item)', 'Waits for `item`.'),
      tasks.Pair('pkg.mod Outer.Inner.method.helper()', 'Helps.'),
      tasks.Pair('pkg.mod guarded()', 'Guards.'),
  ]


def test_docstrings_that_describe_nothing_are_left_out():
  source = '''
def silent(): pass
def empty(): ""
def blank(): """   """
def mark(): """+"""
def prompt():
  """
  >>> import io
  """
'''
  assert tasks.docstring_pairs('mod', source) == []


def test_the_first_of_equal_signatures_counts():
  source = '''
def f(a): "First."
def f(a): "Second."
def f(a, b): "Other."
'''
  assert tasks.docstring_pairs('mod', source) == [
      tasks.Pair('mod f(a)', 'First.'), tasks.Pair('mod f(a, b)', 'Other.')
  ]


def read_docstrings(cache_dir, monkeypatch, sources):
  """Reads the task as another process would, of a library of `sources`."""
  tasks.docstrings.python_docstrings.cache_clear()
  monkeypatch.setattr(stdlib, 'module_sources', sources)
  task = tasks.load_task('python-docstrings', cache_dir=cache_dir)
  tasks.docstrings.python_docstrings.cache_clear()
  return task


def test_the_library_is_parsed_once_for_all_processes(tmp_path, monkeypatch):
  library = [('bisect', 'def f(ä): "Wörds."'), ('asyncio.sslproto', '')]
  written = read_docstrings(tmp_path / 'new', monkeypatch, lambda: library)
  assert written.train == (tasks.Pair('bisect f(ä)', 'Wörds.'),)
  read = read_docstrings(tmp_path / 'new', monkeypatch, None)
  assert read == written and read.fingerprint == written.fingerprint
  (path,) = (tmp_path / 'new').iterdir()
  version = stdlib.python_identity()['python']
  other = dict(stdlib.python_identity(), python='3.0.0')
  path.with_name(path.name.replace(version, '3.0.0')).write_text(
      path.read_text()
  )
  monkeypatch.setattr(stdlib, 'python_identity', lambda: other)
  assert not read_docstrings(tmp_path / 'new', monkeypatch, lambda: []).train
  assert len(os.listdir(tmp_path / 'new')) == 2


def test_a_damaged_file_of_docstrings_is_replaced(
    tmp_path, monkeypatch, caplog
):
  library = [('bisect', 'def f(): "Finds."')]
  written = read_docstrings(tmp_path, monkeypatch, lambda: library)
  (path,) = tmp_path.iterdir()
  text = path.read_text()
  path.write_text(text.replace('Finds', 'Feels'))
  assert read_docstrings(tmp_path, monkeypatch, lambda: library) == written
  assert 'is damaged' in caplog.text
  assert path.read_text() == text


def test_docstrings_are_read_without_a_folder_to_write(
    tmp_path, monkeypatch, caplog
):
  (tmp_path / 'file').touch()
  library = [('bisect', 'def f(): "Finds."')]
  assert read_docstrings(tmp_path / 'file', monkeypatch, lambda: library).train
  assert 'parsed again' in caplog.text


def test_an_unknown_task_is_refused_with_the_nearest_name():
  refuse("'docstrings'.*'python-docstrings'", tasks.load_task, 'docstrings')
