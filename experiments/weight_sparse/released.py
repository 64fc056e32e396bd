"""Checkpoints in the format of openai/circuit_sparsity: read and written.

A folder has `beeg_config.json`, the sizes, and `final_model.pt`, a state dict
of PyTorch. The authors' inference code and viewer take what is written here;
`load_model` needs `flash=True` for models with an attention sink.
"""

from collections.abc import Iterator, Mapping
import json
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.weight_sparse import model as models
from spdf_jax import extras
from spdf_jax import files

PyTree = Any
CONFIG, WEIGHTS = 'beeg_config.json', 'final_model.pt'

# Fields of the authors' GPTConfig with the only values that this model has, and
# those of files that lack them.
_FIXED: dict[str, tuple[Any, Any]] = {
    'rms_norm': (True, False),
    'residual_activation_type': ('identity', 'identity'),
    'd_pos_emb': (None, None),
    'use_tied_aux_matrix': (False, False),
}


def write(
    folder: str | os.PathLike[str],
    model: models.WeightSparseGPT,
    params: PyTree,
) -> None:
  """Writes a model for the authors' inference code.

  Args:
    folder: Folder for the two files, which is created.
    model: The model.
    params: Parameters of the model.

  Raises:
    ImportError: `torch` is not installed.
  """
  torch = extras.require('torch', None)
  folder = pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  state = {
      name: torch.tensor(np.asarray(x, np.float32))
      for name, x in _to_state(model, params).items()
  }
  with files.replacing(folder / WEIGHTS) as path:
    torch.save(state, path)
  files.write_atomically(
      folder / CONFIG, json.dumps(_to_config(model), indent=2)
  )


def read(
    folder: str | os.PathLike[str],
) -> tuple[models.WeightSparseGPT, PyTree]:
  """Reads a model that the authors, or `write`, have written.

  Args:
    folder: Folder of the two files.

  Returns:
    The model, and its parameters in float32. A model with embeddings of
    positions that are all zero has none; a bias of the logits is added to the
    table of bigrams.

  Raises:
    ImportError: `torch` is not installed.
    ValueError: the model has parts that `WeightSparseGPT` lacks, or a weight is
      missing or has another shape.
    OSError: a file is missing.
  """
  torch = extras.require('torch', None)
  folder = pathlib.Path(folder)
  config = files.read_object(
      folder / CONFIG, 'use the folder of a released model.'
  )
  # Loads tensors only: no code of the file is run.
  state = torch.load(
      folder / WEIGHTS, map_location='cpu', weights_only=True
  )
  arrays = {name: x.float().numpy() for name, x in state.items()}
  model = _from_config(config, arrays, folder)
  tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
  shapes = jax.eval_shape(model.init, jax.random.key(0), tokens)['params']
  return model, _from_state(model, arrays, shapes, folder)


def _to_config(model: models.WeightSparseGPT) -> dict[str, Any]:
  cut = model.kept_activations < 1
  return {
      'block_size': model.max_length, 'vocab_size': model.vocab_size,
      'n_layer': model.n_layers, 'n_head': model.n_heads,
      'd_head': model.head_size, 'd_model': model.d_model, 'd_mlp': model.d_ff,
      'dropout': 0.0, 'bias': model.biases, 'ln_bias': False, 'rms_norm': True,
      'residual_activation_type': 'identity',
      'activation_type': model.activation,
      'afrac': model.kept_activations if cut else None,
      'afrac_loctypes': ','.join(model.locations),
      'tied_unembed': model.tied, 'enable_bigram_table': model.bigrams,
      'learnable_bigram_table': model.bigrams, 'd_pos_emb': None,
      'flash': True, 'sink': model.sink, 'grad_checkpointing': False,
  }


def _from_config(
    config: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray],
    folder: pathlib.Path,
) -> models.WeightSparseGPT:
  for name, (value, missing) in _FIXED.items():
    if config.get(name, missing) != value:
      raise ValueError(
          f'{folder / CONFIG} has {name} {config.get(name, missing)!r}, and '
          f"WeightSparseGPT has {value!r} only; read it by the authors' code."
      )
  get, width = config.get, config['d_model']
  positions = arrays.get('transformer.wpe.weight')
  model, _ = models.make_model(
      vocab_size=config['vocab_size'], d_model=width,
      max_length=config['block_size'], n_layers=config['n_layer'],
      n_heads=config['n_head'],
      head_size=get('d_head') or width // config['n_head'],
      d_ff=get('d_mlp') or get('n_mlp') or 4 * width,
      kept_activations=get('afrac') or 1.0,
      locations=tuple(
          get('afrac_loctypes', 'attn_in,attn_out,mlp_in,mlp_out').split(',')
      ),
      activation=get('activation_type', 'gelu'), biases=get('bias', True),
      sink=get('sink', False), tied=get('tied_unembed', True),
      positions=positions is not None and bool(positions.any()),
      bigrams=get('enable_bigram_table', False) or bool(
          np.any(arrays.get('final_logits_bias', 0))
      ),
  )
  return model


def _names(model: models.WeightSparseGPT) -> Iterator[tuple[str, str, bool]]:
  """Yields our path, their name, and whether the matrix is transposed."""
  yield 'wte/embedding', 'transformer.wte.weight', False
  if model.positions:
    yield 'wpe/embedding', 'transformer.wpe.weight', False
  for i in range(model.n_layers):
    ours, theirs = f'h_{i}', f'transformer.h.{i}'
    for name, layer in (
        ('qkv', 'attn.c_attn'), ('out', 'attn.c_proj'), ('wi', 'mlp.c_fc'),
        ('wo', 'mlp.c_proj'),
    ):
      yield f'{ours}_{name}/kernel', f'{theirs}.{layer}.weight', True
      if model.biases:
        yield f'{ours}_{name}/bias', f'{theirs}.{layer}.bias', False
    for name in ('ln_1', 'ln_2'):
      yield f'{ours}_{name}/scale', f'{theirs}.{name}.weight', False
    if model.sink:
      yield f'{ours}_sink', f'{theirs}.attn.attn_imp.sink_logit', False
  yield 'ln_f/scale', 'transformer.ln_f.weight', False
  if not model.tied:
    yield 'head/kernel', 'lm_head.weight', True
  if model.bigrams:
    yield 'bigrams', 'bigram_table', False


def _to_state(
    model: models.WeightSparseGPT, params: PyTree
) -> dict[str, np.ndarray]:
  def array(path):
    node = params
    for part in path.split('/'):
      node = node[part]
    return np.asarray(node)

  state = {
      theirs: array(ours).T if transposed else array(ours)
      for ours, theirs, transposed in _names(model)
  }
  if not model.positions:
    state['transformer.wpe.weight'] = np.zeros(
        (model.max_length, model.d_model), np.float32
    )
  if model.tied:
    state['lm_head.weight'] = state['transformer.wte.weight']
  state['final_logits_bias'] = np.zeros(model.vocab_size, np.float32)
  return state


def _from_state(
    model: models.WeightSparseGPT,
    arrays: Mapping[str, np.ndarray],
    shapes: PyTree,
    folder: pathlib.Path,
) -> PyTree:
  given = dict(arrays)
  size = model.vocab_size
  if model.bigrams:
    table = given.get('bigram_table', np.zeros((size, size), np.float32))
    given['bigram_table'] = table + given.get('final_logits_bias', 0)
  params: dict[str, Any] = {}
  for ours, theirs, transposed in _names(model):
    *above, last = ours.split('/')
    wanted = shapes
    for part in (*above, last):
      wanted = wanted[part]
    array = given[theirs] if theirs in given else None
    if array is not None and transposed:
      array = array.T
    if array is None or array.shape != wanted.shape:
      found = 'is missing' if array is None else f'has shape {array.shape}'
      raise ValueError(
          f'{theirs!r} {found} in {folder / WEIGHTS}, and sizes in {CONFIG} '
          f'need {wanted.shape}; use the two files of one model.'
      )
    node = params
    for part in above:
      node = node.setdefault(part, {})
    node[last] = jnp.asarray(array)
  return params
