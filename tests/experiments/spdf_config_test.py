"""The config of SPDF's pre-training: planned without its corpus."""

import pytest

from configs import spdf
from spdf_jax.costs.plan_costs import describe_plan
from spdf_jax.training import Run
from tests.refusals import refuse

pytestmark = pytest.mark.papers


def plan_of(arg):
  run = Run.create(spdf.get_config(arg), planning=True)
  phase, = describe_plan(run, 'plan')['phases']
  return run, phase


# SPDF, appendix, table 2: FLOPs of the whole pre-training, and against dense.
@pytest.mark.parametrize('model, sparsity, flops, share', [
    ('gpt2-small', 0.0, 2.43e18, 1.0),
    ('gpt2-small', 0.5, 1.79e18, 0.737),
    ('gpt2-small', 0.75, 1.46e18, 0.601),
    ('gpt3-xl', 0.0, 2.36e20, 1.0),
    ('gpt3-xl', 0.5, 1.42e20, 0.601),
    ('gpt3-xl', 0.75, 9.48e19, 0.401),
])
def test_flops_of_the_plan_equal_the_published_ones(
    model, sparsity, flops, share
):
  _, phase = plan_of(f'model={model},sparsity={sparsity}')
  total = phase['steps'] * phase['flops_per_step']
  assert total == pytest.approx(flops, rel=0.01)
  ratio = phase['flops_per_step'] / phase['dense_flops_per_step']
  assert ratio == pytest.approx(share, abs=0.006)


@pytest.mark.parametrize('model', sorted(spdf._SETTINGS))
def test_every_model_can_be_planned(model):
  run, phase = plan_of(f'model={model}')
  assert phase['sparsity'] == pytest.approx(0.75, abs=1e-4)
  per_parameter = phase['tokens'] / run.parameters
  assert 18 < per_parameter < 21


def test_training_needs_the_corpus():
  refuse('corpora/pile', Run.create, spdf.get_config())


def test_a_corpus_for_planning_only_cannot_be_read():
  run, _ = plan_of('')
  refuse("'./corpora/pile' is only planned", run.programs.batch_at, 0)
