"""Circuits of a model whose circuit is known, and their drawing."""

import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[2]
if not (ROOT / 'experiments').is_dir():
  pytest.skip('needs the checkout', allow_module_level=True)

from experiments import weight_sparse_study  # noqa: E402
from experiments.weight_sparse import circuits  # noqa: E402
from experiments.weight_sparse import figures  # noqa: E402
from experiments.weight_sparse import model as models  # noqa: E402
from experiments.weight_sparse import tasks  # noqa: E402
from tests import command  # noqa: E402

SIZES = dict(
    vocab_size=6, d_model=16, max_length=8, n_layers=1, kept_activations=1.0,
    biases=False, bigrams=False,
)
A, B, YES, NO, PAD = range(5)


def copying():
  """A model whose first value channels carry whether A or B was seen."""
  model, _ = models.make_model(**SIZES)
  shapes = jax.eval_shape(
      model.init, jax.random.key(0), np.zeros((1, 2), np.int32)
  )['params']
  params = jax.tree.map(lambda x: np.zeros(x.shape, np.float32), shapes)
  for name in ('h_0_ln_1', 'h_0_ln_2', 'ln_f'):
    params[name]['scale'][:] = 1
  embedding = params['wte']['embedding']
  embedding[A, 2], embedding[B, 2], embedding[PAD, 9] = 1, -1, 1
  params['h_0_qkv']['kernel'][2, 2 * 16 + 5] = 3  # From channel 2 to value 5.
  params['h_0_out']['kernel'][5, 7] = 4  # From value 5 to channel 7.
  params['head']['kernel'][7, YES], params['head']['kernel'][7, NO] = 2, -2
  params['h_0_wi']['kernel'][9, 0] = 1  # A weight that the task does not need.
  return model, jax.tree.map(jnp.asarray, params)


def prompts():
  tokens = np.array([[PAD, a, PAD, PAD] for a in (A, B) * 4], np.int32)
  answers = np.array([[YES, NO], [NO, YES]] * 4, np.int32)
  return tasks.Prompts(tokens, answers)


KNOWN = {
    'h_0/attn_in': [2], 'h_0/attn_v': [5], 'h_0/attn_out': [7],
    'resid_final': [7],
}


def test_the_circuit_that_was_built_is_found_and_drawn(tmp_path):
  model, params = copying()
  circuit = circuits.find(
      model, params, prompts().tokens, prompts(), prompts(), 0.3, steps=150
  )
  assert {k: list(v) for k, v in circuit.nodes.items() if v} == KNOWN
  assert circuit.loss <= 0.3 and circuit.accuracy == 1 and circuit.size == 4
  assert circuits.edges(model, params, circuit.nodes) == [
      (('h_0/attn_in', 2), ('h_0/attn_v', 5), 3.0),
      (('h_0/attn_v', 5), ('h_0/attn_out', 7), 4.0),
  ]
  names = {A: 'a', B: 'b', YES: 'yes', NO: 'no'}
  figure = figures.plot_circuit(
      model, params, circuit, prompts(), lambda tokens: names[tokens[0]]
  )
  figure.savefig(tmp_path / 'circuit.png')
  ax = figure.axes[0]
  assert '4 nodes, 2 weights' in ax.get_title()
  assert [label.get_text() for label in ax.get_yticklabels()] == [
      'token', 'layer 0: attention reads', 'layer 0: queries, keys, values',
      'layer 0: attention writes', 'output reads', 'answer',
  ]
  # From the tokens to the answers, with the signs of the weights.
  assert [text.get_text() for text in ax.texts] == [
      '+1', '-1', '+3', '+4', '+2', '-2',
      'a', 'b', '2', 'v 0.5', '7', '7', 'yes', 'no',
  ]


def test_without_nodes_all_prompts_have_one_answer():
  model, params = copying()
  means = circuits.mean_activations(model, params, prompts().tokens)
  gates = {name: np.zeros(n) for name, n in circuits.locations(model).items()}
  logits = circuits.ablated_logits(
      model, params, means, gates, prompts().tokens
  )
  assert np.ptp(np.asarray(logits), axis=0).max() < 1e-6
  whole = circuits.ablated_logits(
      model, params, means, jax.tree.map(lambda g: g + 1, gates),
      prompts().tokens,
  )
  np.testing.assert_allclose(
      whole, model.apply({'params': params}, prompts().tokens)[:, -1],
      atol=1e-6,
  )


def test_a_task_that_is_not_solved_has_no_circuit():
  model, params = copying()
  wrong = prompts()._replace(answers=prompts().answers[:, ::-1])
  assert circuits.find(
      model, params, prompts().tokens, wrong, wrong, 0.3, steps=2
  ) is None


def test_thresholds_have_the_gradient_of_a_sigmoid():
  x = jnp.array([-2.0, -0.1, 0.5])
  assert circuits.step_function(x).tolist() == [0, 0, 1]
  grads = jax.grad(lambda x: circuits.step_function(x).sum())(x)
  np.testing.assert_allclose(
      grads, jax.grad(lambda x: jax.nn.sigmoid(x).sum())(x), rtol=1e-6
  )


def test_prompts_come_in_pairs_that_differ_in_the_mark():
  encode = lambda text: list(text.encode())
  made = tasks.make_prompts(
      tasks.TASKS['bracket'], encode, ['alpha', 'be', 'far_too_long'], 14
  )
  texts = [bytes(row).decode() for row in made.tokens.tolist()]
  assert texts == [
      'x = self(alpha', 'x = self[alpha', '\n\n\n\ny = get(be',
      '\n\n\n\ny = get[be',
  ]
  assert bytes(made.answers.ravel().tolist()) == b')]])' * 2
  assert bytes(tasks.marks_of(made)) == b'(['
  with pytest.raises(ValueError, match='no word gives a pair'):
    tasks.make_prompts(tasks.TASKS['quote'], encode, ['far_too_long'], 8)
  with pytest.raises(ValueError, match='no single token'):
    tasks.make_prompts(tasks.TASKS['call'], encode, ['alpha'], 8)


def test_losses_are_drawn_by_width_and_kept_fraction(tmp_path):
  rows = [
      dict(width=w, kept=k, seed=s, kept_weights=w * w // k, loss=5 - w / 100)
      for w in (64, 128) for k in (1, 16) for s in range(2)
  ]
  ax = figures.plot_losses(rows).axes[0]
  assert [t.get_text() for t in ax.texts] == ['1/16', 'dense'] * 2


def test_a_record_replaces_that_of_the_same_run_task_and_target(tmp_path):
  path = tmp_path / 'circuits.json'
  row = dict(run='a', task='quote', target=0.3, loss=3.0)
  others = [row | dict(run='b'), row | dict(task='call'), row | dict(target=.2)]
  for each in (row, *others):
    weight_sparse_study.record_circuit(path, each)
  assert json.loads(path.read_text()) == [row, *others]
  weight_sparse_study.record_circuit(path, row | dict(loss=2.0))
  assert json.loads(path.read_text()) == [*others, row | dict(loss=2.0)]


@pytest.mark.slow
def test_the_command_trains_each_model_once_and_finds_circuits(tmp_path):
  def study(name, *flags):
    return command.run(
        'weight_sparse_study', f'--study={name}', f'--output={tmp_path}',
        f'--workdir={tmp_path / "runs"}', *flags,
    )

  points = '--widths=32', '--repeated=32/4', '--seeds=2'
  assert not study('losses', *points, '--kept=1', '--steps=12').status
  first = (tmp_path / 'losses.json').read_text()
  # As on another machine, which has the records only.
  shutil.rmtree(tmp_path / 'runs')
  (tmp_path / 'losses.png').unlink()
  assert not study('losses', *points, '--kept=1,4', '--steps=12').status
  rows = json.loads((tmp_path / 'losses.json').read_text())
  assert rows[:2] == json.loads(first)
  assert [(r['kept'], r['seed']) for r in rows] == [(1, 0), (4, 1), (4, 0)]
  assert [p.name for p in (tmp_path / 'runs').iterdir()] == ['width32-kept4-0']
  assert rows[1]['kept_weights'] < rows[0]['kept_weights'] / 3.9
  assert (tmp_path / 'losses.png').is_file()
  refused = study('losses', *points, '--kept=1,4', '--steps=13')
  assert 'has runs with steps 12, not 13' in refused.log
  assert json.loads((tmp_path / 'losses.json').read_text()) == rows
  # A run is recorded before the next one fails.
  stopped = study('circuit', '--target=0.6', '--runs=width32-kept4-0,nowhere')
  assert stopped.status == 1 and '--runs has nowhere' in stopped.log
  found, = json.loads((tmp_path / 'circuits.json').read_text())
  assert found['run'] == 'width32-kept4-0'
  assert found['tasks'].keys() == tasks.TASKS.keys()


def test_numbers_of_the_results_are_recorded():
  results = ROOT / 'experiments' / 'results' / 'weight_sparse'
  page = (results / 'README.md').read_text()
  read = lambda name: json.loads((results / name).read_text())
  numbers = [
      f'{row["loss"]:.3f}, {row["kept_weights"]:,} '
      for row in read('losses.json') if not row['seed']
  ] + [
      f'{row["circuit"]["size"]}, {row["circuit"]["edges"]}'
      for task in ('quote', 'call') for row in read(f'{task}/circuits.json')
  ] + [
      f'| {row["milliseconds"]:.0f} ms |' if row['step'] == 'dense'
      else '{ratio:.2f} ({low:.2f} to {high:.2f})'.format(**row)
      for row in read('speed.json')
  ]
  assert len(numbers) == 15 + 6 + 9
  assert [number for number in numbers if number not in page] == []
