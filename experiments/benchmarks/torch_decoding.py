"""Decoding by PyTorch, of dense models with our parameters."""

from collections.abc import Callable
import importlib.metadata
import importlib.util
from typing import Any

import numpy as np

from experiments.benchmarks.machine import cores
from spdf_jax import extras
from spdf_jax import models

PyTree = Any

MISSING = (
    'PyTorch is not installed, so it is not measured; use `pip install torch`.'
)
"""Warning of suites that measure PyTorch, without it."""


def is_installed() -> bool:
  """Returns whether PyTorch is installed."""
  return importlib.util.find_spec('torch') is not None


def describe_version() -> dict[str, str]:
  """Returns the version of PyTorch, or nothing if it is not installed."""
  if not is_installed():
    return {}
  return {'torch': importlib.metadata.version('torch')}


def convert(params: PyTree, dtype: str) -> PyTree:
  """Copies the parameters of an unscanned GPT to PyTorch.

  The three projections of attention become one, and matrices [outputs, inputs],
  as `torch.nn.functional.linear` reads them.

  Args:
    params: Parameters, float32.
    dtype: Dtype of the tensors, `'float32'` or `'bfloat16'`.

  Returns:
    Tensors: a tree of the structure of the parameters, with `attn/qkv`.
  """
  torch = extras.require('torch', None)
  tensor = lambda x: torch.from_numpy(np.array(x)).to(getattr(torch, dtype))

  def linear(*layers):
    kernels = [np.asarray(x['kernel']).T for x in layers]
    # Tensors keep strides, and transposed arrays concatenate in column order.
    return {
        'kernel': tensor(np.ascontiguousarray(np.concatenate(kernels))),
        'bias': tensor(np.concatenate([x['bias'] for x in layers])),
    }

  def block(p):
    attn, mlp = p['attn'], p['mlp']
    return {
        'attn': {
            'qkv': linear(attn['wq'], attn['wk'], attn['wv']),
            'wd': linear(attn['wd']),
        },
        'mlp': {name: linear(mlp[name]) for name in ('wi', 'wo')},
    } | {name: {k: tensor(x) for k, x in p[name].items()}
         for name in ('ln_1', 'ln_2')}

  return {
      name: block(p) if name.startswith('h_')
      else {k: tensor(x) for k, x in p.items()}
      for name, p in params.items()
  }


def decoding(
    config: models.GPTConfig,
    tensors: PyTree,
    batch_size: int,
    context: int,
    length: int,
) -> Callable[[], Any]:
  """Returns a function that decodes one token.

  Args:
    config: Config of the model, without the multipliers of muP.
    tensors: Result of `convert`.
    batch_size: Number of sequences.
    context: Number of tokens in the cache, here zeros.
    length: Size of the cache.

  Returns:
    A function `() -> logits [batch_size, vocab_size]` of the token 0 after
    `context` tokens, on all cores that this process may use.
  """
  torch = extras.require('torch', None)
  torch.set_num_threads(cores())
  f = torch.nn.functional
  d, heads = config.d_model, config.n_heads
  wte, wpe = (tensors[name]['embedding'] for name in ('wte', 'wpe'))
  cache = [
      wte.new_zeros(2, batch_size, heads, length, d // heads)
      for _ in range(config.n_layers)
  ]
  norm = lambda x, p: f.layer_norm(x, (d,), p['scale'], p['bias'], 1e-5)
  linear = lambda x, p: f.linear(x, p['kernel'], p['bias'])

  def layer(x, p, keys_and_values):
    qkv = linear(norm(x, p['ln_1']), p['attn']['qkv'])
    q, k, v = qkv.view(batch_size, 3, heads, -1).unbind(1)
    keys, values = keys_and_values
    keys[:, :, context], values[:, :, context] = k, v
    y = f.scaled_dot_product_attention(
        q[:, :, None], keys[:, :, :context + 1], values[:, :, :context + 1]
    )
    x = x + linear(y.reshape(batch_size, d), p['attn']['wd'])
    h = f.gelu(linear(norm(x, p['ln_2']), p['mlp']['wi']), approximate='tanh')
    return x + linear(h, p['mlp']['wo'])

  def step():
    with torch.inference_mode():
      x = (wte[0] + wpe[context]).expand(batch_size, d)
      for i in range(config.n_layers):
        x = layer(x, tensors[f'h_{i}'], cache[i])
      return f.linear(norm(x, tensors['ln_f']), wte)

  return step
