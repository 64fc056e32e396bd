"""Configs with values of other types."""

import pytest
from tiny_run import CONFIG

from spdf_jax.training.config import parse


@pytest.mark.parametrize('value', [[], {}, 3])
@pytest.mark.parametrize('field', [
    'matmul', 'storage', 'model.preset', 'phases.pretrain.data',
    'phases.pretrain.learning_rate.schedule', 'phases.order',
])
def test_a_value_of_another_type_is_refused(field, value):
  *parents, name = field.split('.')
  config = changed = dict(CONFIG)
  for parent in parents:
    changed[parent] = changed = dict(changed[parent])
  changed[name] = value
  with pytest.raises(ValueError, match=f'{name}|phase'):
    parse(config)
