"""Layers: what name stacks say about where an operation comes from."""

import re

_WRAPPED = re.compile(r'\w+\((.*)\)')
_REMAT = 'rematted_computation'
_NO_LAYER = (_REMAT, 'checkpoint', 'remat', 'remat2', '')


def layer_of(path: str) -> tuple[str, str]:
  """Reads a name stack: the module, and the phase of training.

  Args:
    path: Names joined by `'/'`, with the transformations around them.

  Returns:
    The layer and `'forward'`, `'backward'` or `'recompute'`.

  Example:
    >>> layer_of('transpose(jvp(GPT))/h/attn/vmap(ij->ji)')
    ('GPT/h/attn', 'backward')
  """
  phase = 'backward' if 'transpose(' in path else 'forward'
  phase = 'recompute' if _REMAT in path else phase
  names = []
  for part in path.split('/'):
    while match := _WRAPPED.fullmatch(part):
      part = match[1]
    if part not in _NO_LAYER and '->' not in part:
      names.append(part)
  return '/'.join(names), phase
