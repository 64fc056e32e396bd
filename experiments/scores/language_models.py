"""Language models with tokenizers, read from a run or a Hugging Face folder."""

from collections.abc import Mapping
import dataclasses
import functools
import logging
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spdf_jax import data
from spdf_jax import evaluation
from spdf_jax import interop
from spdf_jax import lowerings
from spdf_jax import models
from spdf_jax import training
from spdf_jax.accelerator import list_params
from spdf_jax.interop import layouts
from spdf_jax.interop import tensors
from spdf_jax.sparsity import trees
from spdf_jax.training.checkpoints import files as checkpoint_files
from spdf_jax.training.checkpoints import identity
from spdf_jax.training.checkpoints import workdir
from spdf_jax.training.configs.settings import DataConfig

PyTree = Any

logger = logging.getLogger('spdf_jax')

IMPORTED_MASKS = 'imported_masks.safetensors'
"""File in the workdir of an imported model with its mask, since the checkpoint
has only parameters."""


@dataclasses.dataclass(frozen=True)
class LanguageModel:
  """A trained model together with its tokenizer.

  Attributes:
    name: Name of the model's source, e.g. its run.
    module: The Flax module.
    params: Parameters of the model.
    tokenizer: Tokenizer of the model.
    config: Config of the run; `None` for a model that no run has trained.
    task: Name of the task that the model was fine-tuned on last, `''` if it
      was not: its prompts are contexts, which end with an end of text.

  Raises:
    ValueError: the tokenizer has more tokens than the model.
  """

  name: str
  module: models.GPT | models.Llama
  params: PyTree
  tokenizer: data.Tokenizer
  config: Any = None
  task: str = ''

  def __post_init__(self):
    tokens = self.tokenizer.vocab_size
    vocabulary = self.module.config.vocab_size
    if tokens > vocabulary:
      raise ValueError(
          f'{self.name} has a vocabulary of {vocabulary} and its tokenizer '
          f'{tokens} tokens; give the tokenizer that it was trained with.'
      )

  @property
  def subject(self) -> evaluation.Subject:
    """The model as a `Subject` of the harness and of likelihoods."""
    apply = lambda params, tokens: self.module.apply({'params': params}, tokens)
    return evaluation.Subject(
        jax.jit(apply), self.params, self.tokenizer,
        self.module.config.max_length, evaluation.CachedModel(self.module),
    )


def open_run(source: str, tokenizer: str | None = None) -> LanguageModel:
  """Opens a checkpoint of a run, with the tokenizer of its corpus.

  Args:
    source: `'WORKDIR'`, `'WORKDIR@PHASE'` or `'WORKDIR@PHASE:best'`.
    tokenizer: Path that `data.open_tokenizer` can read; `None`: the tokenizer
      of the run's corpus, which is prepared if it is missing.

  Returns:
    The model with its tokenizer.

  Raises:
    ValueError: there is no such checkpoint, or it does not record its model and
      data.
  """
  return workdir.read_source(
      source, functools.partial(_open_checkpoint, source, tokenizer)
  )


def _open_checkpoint(
    source: str, tokenizer: str | None, checkpoint: pathlib.Path
) -> LanguageModel:
  stored = workdir.read_meta(checkpoint)['config']
  if 'model' not in stored or 'data' not in stored:
    raise ValueError(
        f'checkpoint {checkpoint} does not record its training data; give the '
        'workdir of a training run, or a Hugging Face directory.'
    )
  config = identity.read_config(stored, f'checkpoint {checkpoint}')
  if not isinstance(config.model.sizes, models.DecoderConfig):
    raise ValueError(
        f'checkpoint {checkpoint} is of your own model, {config.model.preset!r}'
        ', which this command does not open; it opens models of '
        'spdf_jax.models.PRESETS.'
    )
  model = models.model_of(config.model.sizes)
  params = _read_params(checkpoint, model)
  return LanguageModel(
      source, model, params,
      data.open_tokenizer(tokenizer) if tokenizer
      else _tokenizer(checkpoint, config.data),
      config, _task_of(checkpoint, config),
  )


def _task_of(checkpoint: pathlib.Path, config: Any) -> str:
  """Returns the task of the phase that a checkpoint belongs to; '' if none."""
  ends = workdir.read_meta(checkpoint)['phase_ends']
  step = int(checkpoint.name)
  for phase in config.phases:
    if step <= ends.get(phase.name, -1):
      return config.data.task if phase.data == 'task' else ''
  return ''


def open_hf(directory: str) -> LanguageModel:
  """Opens a model of transformers with the tokenizer of its directory.

  Text that spells a special token is encoded as that token, as transformers
  does.

  Args:
    directory: Directory that `interop.load_hf` can read, with the files of a
      tokenizer. A compact export is opened by `open_listed`.

  Returns:
    The model with its tokenizer.

  Raises:
    ValueError: a file is missing, or of an unknown kind.
  """
  if _is_compact(pathlib.Path(directory)):
    return open_listed(directory)
  loaded = interop.load_hf(directory)
  tokenizer = _as_transformers(data.open_tokenizer(pathlib.Path(directory)))
  return LanguageModel(
      str(directory), models.model_of(loaded.config),
      jax.tree.map(jnp.asarray, loaded.params), tokenizer,
  )


def open_listed(
    source: str,
    *,
    dtype: str | None = None,
    tokenizer: str | None = None,
    least_sparsity: float = 0.7,
) -> LanguageModel:
  """Opens a model for inference; on CPUs, sparse matrices are listed.

  GPUs and TPUs have no products with lists, and compile one scanned layer
  sooner than all layers. CPUs copy the weights of a scanned layer at each
  token, so that their layers are not scanned.

  Args:
    source: `'WORKDIR'`, `'WORKDIR@PHASE'`, `'WORKDIR@PHASE:best'` or a Hugging
      Face directory. On CPUs a compact export is read matrix by matrix,
      without a dense model; every matrix with a mask is listed.
    dtype: Dtype of the matrices with a mask, `'float32'` or `'bfloat16'`;
      `None`: that of the source.
    tokenizer: Path that `data.open_tokenizer` can read; `None`: the tokenizer
      of the run's corpus, or of the directory.
    least_sparsity: Matrices of a lower sparsity stay dense, except those of a
      compact export. For one sequence, lists are faster from 50 % on
      (`--suite=decode`); with more rows they gain less.

  Returns:
    The model with its tokenizer; on CPUs its sparse products are native.

  Raises:
    ValueError: there is no such model or tokenizer, or it cannot be read.
    TypeError: there are no products of the dtype.
  """
  directory, run = pathlib.Path(source), None
  on_cpu = jax.default_backend() == 'cpu'
  if is_hf(directory):
    reader = _as_transformers(data.open_tokenizer(tokenizer or directory))
    if on_cpu and _is_compact(directory):
      config, params, mask = interop.load_listed(directory, dtype=dtype)
    else:
      config, params, mask = interop.load_hf(directory)
      mask = interop.mask_of_zeros(params) if mask is None else mask
  else:
    def read(checkpoint):
      run = _open_checkpoint(source, tokenizer, checkpoint)
      return run, mask_of(checkpoint, run.params)

    run, mask = workdir.read_source(source, read)
    reader = run.tokenizer
    config = dataclasses.replace(run.module.config, scan_layers=False)
    params, mask = (
        None if tree is None
        else interop.unstack_layers(jax.tree.map(np.asarray, tree))
        for tree in (run.params, mask)
    )
  if on_cpu:
    if mask is not None:
      mask = jax.tree.map(
          lambda m: m if m.mean() <= 1 - least_sparsity else None, mask
      )
      params = list_params(params, mask, dtype=dtype)
      if config.dtype == 'float16':  # Listed matrices do not support float16.
        config = dataclasses.replace(config, dtype='float32')
    config = dataclasses.replace(config, lowering=lowerings.NATIVE)
  else:
    if mask is not None and dtype is not None:
      params = jax.tree.map(
          lambda m, x: x if m is None else x.astype(dtype), mask, params,
          is_leaf=lambda m: m is None,
      )
    params = interop.stack_layers(params)
    config = dataclasses.replace(config, scan_layers=True)
  return LanguageModel(
      source, models.model_of(config), jax.tree.map(jnp.asarray, params),
      reader, run and run.config, run.task if run else '',
  )


def _as_transformers(tokenizer: data.Tokenizer) -> data.Tokenizer:
  """Returns a tokenizer that encodes special tokens as transformers does."""
  if isinstance(tokenizer, data.LibraryTokenizer):
    return data.with_special_tokens(tokenizer)
  return tokenizer


def _tokenizer(
    checkpoint: pathlib.Path, config: DataConfig
) -> data.Tokenizer:
  """Returns the tokenizer of a corpus, which is prepared if it must be."""
  name, where = config.corpus, dict(
      tokenizer=config.tokenizer, cache_dir=config.cache_dir
  )
  try:
    current = data.read_tokenizer(name, **where)
  except OSError:
    current = data.prepare_corpus(name, **where).tokenizer
  _check_tokenizer(checkpoint, current)
  return current


def _check_tokenizer(
    checkpoint: pathlib.Path, tokenizer: data.Tokenizer
) -> None:
  """Raises ValueError unless a checkpoint was trained with a tokenizer."""
  trained = workdir.read_item(checkpoint, 'data')['fingerprints']
  if trained.get('tokenizer', tokenizer.fingerprint) != tokenizer.fingerprint:
    raise ValueError(
        f'checkpoint {checkpoint} was trained with another tokenizer '
        f'({trained["tokenizer"][:12]}) than its corpus has now '
        f'({tokenizer.fingerprint[:12]}); restore or prepare the corpus as it '
        'was.'
    )


def read_model(source: str) -> tuple[models.GPT | models.Llama, PyTree]:
  """Reads a model without its tokenizer.

  Args:
    source: `'WORKDIR'`, `'WORKDIR@PHASE'`, `'WORKDIR@PHASE:best'` or a Hugging
      Face directory.

  Returns:
    The Flax module and its parameters.

  Raises:
    ValueError: there is no model, or the checkpoint does not record its sizes.
  """
  directory = pathlib.Path(source)
  if is_hf(directory):
    loaded = interop.load_hf(directory)
    return models.model_of(loaded.config), loaded.params
  return workdir.read_source(source, model_at)


def model_at(
    checkpoint: pathlib.Path,
) -> tuple[models.GPT | models.Llama, PyTree]:
  """Reads the model of a checkpoint; raises ValueError as `read_model`."""
  stored = workdir.read_meta(checkpoint)['config']
  if 'model' not in stored:
    raise ValueError(
        f'checkpoint {checkpoint} does not record its model; give one that '
        'experiments.train or experiments.convert wrote.'
    )
  model = models.create_model(**stored['model'])
  return model, _read_params(checkpoint, model)


def mask_of(checkpoint: pathlib.Path, params: Any) -> Any:
  """Returns the mask of a checkpoint's parameters.

  Args:
    checkpoint: Directory of the checkpoint.
    params: Parameters of one of our models.

  Returns:
    A tree of booleans, with `None` for dense leaves; `None` if no weight is
    pruned. If the checkpoint has only parameters, the mask in `IMPORTED_MASKS`,
    in the structure of the unscanned parameters, or else the result of
    `interop.mask_of_zeros`.

  Raises:
    ValueError: the mask in `IMPORTED_MASKS` does not fit the parameters.
  """
  masks: Mapping[str, Any] = checkpoint_files.read_masks(checkpoint)
  imported = checkpoint.parent.parent / IMPORTED_MASKS
  if masks and all(mask.all() for mask in masks.values()):
    return None
  if not masks and imported.exists():
    params = interop.unstack_layers(jax.tree.map(np.asarray, params))
    masks = tensors.read_tensors(imported)
    layouts.check_masks(str(imported), masks, layouts.shapes_of(params))
    layouts.refuse_pruned_weights(str(imported), trees.by_name(params), masks)
  elif not masks:
    logger.warning(
        'checkpoint %s holds only parameters: the mask is derived from their '
        'zeros.', checkpoint,
    )
    return interop.mask_of_zeros(params)
  return jax.tree_util.tree_map_with_path(
      lambda path, _: masks.get(trees.path_name(path)), params
  )


def tokenizer_of(
    checkpoint: pathlib.Path, vocab_size: int
) -> data.Tokenizer | None:
  """Returns the tokenizer of the corpus that a checkpoint was trained on.

  Args:
    checkpoint: Directory of the checkpoint.
    vocab_size: Number of tokens of the model.

  Returns:
    The tokenizer; `None` for an imported checkpoint, or if the tokenizer cannot
    be read, with a warning.
  """
  stored = workdir.read_meta(checkpoint)['config']
  if 'data' not in stored:
    return None
  try:
    config = identity.read_config(stored, f'checkpoint {checkpoint}').data
    tokenizer = data.read_tokenizer(
        config.corpus, tokenizer=config.tokenizer, cache_dir=config.cache_dir
    )
    _check_tokenizer(checkpoint, tokenizer)
    if tokenizer.vocab_size > vocab_size:
      raise ValueError(
          f'it has {tokenizer.vocab_size} tokens and the model {vocab_size}'
      )
  except (ImportError, OSError, ValueError) as error:
    logger.warning(
        'the export has no tokenizer and names no end of text, since the '
        'tokenizer of checkpoint %s cannot be used (%s); set eos_token_id in '
        'its config.json.', checkpoint, error,
    )
    return None
  return tokenizer


def is_hf(directory: pathlib.Path) -> bool:
  """Returns whether a directory holds a Hugging Face model, and no run."""
  is_run = (directory / 'checkpoints').exists()
  return (directory / tensors.CONFIG).is_file() and not is_run


def _is_compact(directory: pathlib.Path) -> bool:
  """Returns whether the weights of a Hugging Face model are compact."""
  return tensors.find_weights(directory).name == tensors.COMPACT


def _read_params(
    checkpoint: pathlib.Path, model: models.GPT | models.Llama
) -> PyTree:
  tokens = jnp.zeros((1, 2), jnp.int32)
  shapes = jax.eval_shape(model.init, jax.random.key(0), tokens)['params']
  return training.read_params(checkpoint, shapes)
