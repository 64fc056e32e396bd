"""A run records masks that move, and warns once where they cut off units."""

import json
import logging

import jax.numpy as jnp
import numpy as np
import pytest

import spdf_jax as spdf
from spdf_jax import files
from spdf_jax.runs import mask_plots
from spdf_jax.runs import read
from spdf_jax.training import train
from tests.tiny_run import make_config
from tests.tiny_run import run_of
from tests.tiny_run import static


def gather(units):
  """Grows the first outputs alone, as no gradient does."""
  return -jnp.broadcast_to(
      jnp.arange(units.mask.shape[-1]), units.mask.shape
  ).astype(jnp.float32)


GATHERING = dict(
    name='rigl', sparsity=0.75, update_every=1, update_until=4,
    drop_fraction=dict(schedule='constant_schedule', value=0.9),
    grow=f'{__name__}:gather',
)


def trained(workdir, algorithm):
  """Trains a phase of five steps, of which each but the first is an update."""
  run = run_of(make_config(
      phases__pretrain__algorithm=algorithm, phases__order=['pretrain'],
      eval_every=1,
  ))
  return train(run.open(workdir)), run


@pytest.fixture(scope='module')
def gathered(tmp_path_factory):
  workdir = tmp_path_factory.mktemp('gathered')
  records = []
  handler = logging.Handler()
  handler.emit = records.append
  logger = logging.getLogger('spdf_jax')
  logger.addHandler(handler)
  state, run = trained(workdir, GATHERING)
  logger.removeHandler(handler)
  mask = spdf.get_mask(state.opt_state)
  layers = spdf.summarize(mask, state.params, where=run.model.where).layers
  return workdir, [r.getMessage() for r in records], mask, layers


def test_masks_that_cut_off_units_are_named_once(gathered):
  _, messages, _, layers = gathered
  warnings = [text for text in messages if 'keep no weight' in text]
  (text,) = warnings  # Of four evaluations after updates.
  step, share = int(text.split()[1][:-1]), float(text.split()[2][:-1])
  assert step in (2, 3)
  worst = max(layers.values(), key=lambda layer: layer.cut_off)
  assert 20 < share <= 100 * worst.cut_off + 0.1
  assert any(repr(name) in text for name in layers)
  assert "a random mask has 0.9%" in text and "grow='balanced'" in text


def test_units_that_may_return_are_recorded_without_a_warning(tmp_path, caplog):
  blocks = dict(structure='block', inputs=4, outputs=4)
  state, run = trained(
      tmp_path, dict(name='hard_threshold', sparsity=0.75, structure=blocks)
  )
  mask = spdf.get_mask(state.opt_state)
  layers = spdf.summarize(mask, state.params, where=run.model.where).layers
  assert any(layer.cuts_off_units for layer in layers.values())
  assert (tmp_path / 'masks.json').exists()
  assert 'keep no weight' not in caplog.text


def test_a_static_run_neither_warns_nor_records(tmp_path, caplog):
  trained(tmp_path, static(0.9))  # Two thirds of a layer's units keep a weight.
  assert 'keep no weight' not in caplog.text
  assert not (tmp_path / 'masks.json').exists()


def test_the_record_has_the_counts_and_the_picture_of_the_mask(gathered):
  workdir, _, mask, layers = gathered
  stored = json.loads((workdir / 'masks.json').read_text())
  record = files.unseal(stored, 'masks.json')
  assert (record['step'], record['phase']) == (5, 'pretrain')
  assert set(record['layers']) == set(layers)
  leaves = spdf.sparsity.trees.by_name(mask)
  for name, layer in record['layers'].items():
    m = np.asarray(leaves[name]).reshape(16, 16)
    assert layer['inputs'] == sorted(m.sum(1))
    assert layer['outputs'] == sorted(m.sum(0))
  picture = record['picture']
  np.testing.assert_array_equal(
      picture['densities'],
      np.asarray(leaves[picture['layer']]).reshape(16, 16),
  )
  assert layers[picture['layer']].column_variation == max(
      layer.column_variation for layer in layers.values()
  )


def test_a_damaged_record_is_named(gathered, tmp_path):
  record = json.loads((gathered[0] / 'masks.json').read_text())
  (tmp_path / 'masks.json').write_text(json.dumps(record | {'step': 4}))
  with pytest.raises(ValueError, match=r'masks.json is damaged'):
    read.read_masks(tmp_path)


def test_kept_weights_per_unit_are_drawn_as_multiples_of_the_mean(gathered):
  masks = read.read_masks(gathered[0])
  run = read.RunRecord('toy', (), (), masks=masks)
  still = read.RunRecord('still', (), ())
  figure = mask_plots.plot_kept_per_unit({'toy': run, 'still': still})
  (ax,) = figure.axes
  assert len(ax.lines) == 2 * len(masks['layers']) + 1
  drawn = [list(line.get_ydata()) for line in ax.lines]
  for layer in masks['layers'].values():
    counts = np.asarray(layer['outputs'])
    assert list(counts / counts.mean()) in drawn
  assert [text.get_text() for text in ax.texts] == ['inputs', 'outputs']
