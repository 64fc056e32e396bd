"""A dense GPT in PyTorch with our parameters: training steps and decoding.

The model computes the same function as `plain_gpt`, as a user of PyTorch writes
it. PyTorch is imported when it is used; it is not among the extras.
"""

from collections.abc import Callable, Mapping
import importlib.metadata
import importlib.util
from typing import Any

import jax
import numpy as np

from spdf_jax import extras
from spdf_jax import models
from spdf_jax.accelerator import processor

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


def create_step(
    config: models.GPTConfig,
    params: PyTree,
    batch: Any,
    *,
    dtype: str,
    is_compiled: bool,
    learning_rate: float,
    weight_decay: float,
    b1: float,
    b2: float,
    eps: float,
    clip_norm: float,
) -> Callable[[], float]:
  """Creates a training step with AdamW, which updates a model of its own.

  Args:
    config: Sizes of the model.
    params: Parameters of `models.GPT`, which are copied.
    batch: Batch of every step.
    dtype: `float32`, or `bfloat16` for products under `torch.autocast`.
    is_compiled: Whether the model is compiled by `torch.compile`.
    learning_rate: Learning rate of every step.
    weight_decay: Weight decay of matrices.
    b1: First decay rate of AdamW.
    b2: Second decay rate of AdamW.
    eps: Epsilon of AdamW.
    clip_norm: Largest norm of the gradients.

  Returns:
    A function that takes a step, on all cores that this process may use, and
    returns its loss.
  """
  torch = extras.require('torch', None)
  torch.set_num_threads(processor.cores())
  model = create_model(config, params)
  call = torch.compile(model) if is_compiled else model
  groups: dict[bool, list[Any]] = {True: [], False: []}
  for p in model.parameters():
    groups[p.ndim > 1].append(p)
  optimizer = torch.optim.AdamW(
      [
          dict(params=groups[True], weight_decay=weight_decay),
          dict(params=groups[False], weight_decay=0.0),
      ],
      lr=learning_rate, betas=(b1, b2), eps=eps, fused=True,
  )
  inputs, targets = (
      torch.tensor(np.asarray(x), dtype=torch.long)
      for x in (batch.inputs, batch.targets)
  )
  casts = dtype == 'bfloat16'

  def step() -> float:
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast('cpu', torch.bfloat16, enabled=casts):
      logits = call(inputs)
    loss = torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten()
    )
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    optimizer.step()
    return loss.item()

  return step


def create_model(config: models.GPTConfig, params: PyTree) -> Any:
  """Creates a `torch.nn.Module` with copies of the parameters of a GPT."""
  torch = extras.require('torch', None)
  nn = torch.nn
  functional = nn.functional
  heads = config.n_heads, config.head_size

  def of(x: Any) -> Any:
    return nn.Parameter(torch.tensor(np.asarray(x)))

  def linear(p: Mapping[str, Any]) -> Any:
    layer = nn.Linear(*p['kernel'].shape)
    # `torch.tensor` keeps strides, and a transposed array is in column order.
    weight = np.ascontiguousarray(np.asarray(p['kernel']).T)
    layer.weight, layer.bias = of(weight), of(p['bias'])
    return layer

  def norm(p: Mapping[str, Any]) -> Any:
    layer = nn.LayerNorm(config.d_model, eps=1e-5)
    layer.weight, layer.bias = of(p['scale']), of(p['bias'])
    return layer

  class Layer(nn.Module):  # type: ignore[misc, name-defined]

    def __init__(self, p: Mapping[str, Any]):
      super().__init__()
      self.ln_1, self.ln_2 = norm(p['ln_1']), norm(p['ln_2'])
      attn, mlp = p['attn'], p['mlp']
      # One product for queries, keys and values, as PyTorch's users write it.
      qkv = [attn[name] for name in ('wq', 'wk', 'wv')]
      self.qkv = linear(jax.tree.map(
          lambda *xs: np.concatenate(xs, axis=-1), *qkv
      ))
      self.wd = linear(attn['wd'])
      self.wi, self.wo = linear(mlp['wi']), linear(mlp['wo'])

    def forward(self, x: Any) -> Any:
      q, k, v = (
          part.unflatten(-1, heads).transpose(1, 2)
          for part in self.qkv(self.ln_1(x)).chunk(3, dim=-1)
      )
      y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
      x = x + self.wd(y.transpose(1, 2).flatten(2))
      hidden = functional.gelu(self.wi(self.ln_2(x)), approximate='tanh')
      return x + self.wo(hidden)

  class GPT(nn.Module):  # type: ignore[misc, name-defined]

    def __init__(self) -> None:
      super().__init__()
      self.wte = of(params['wte']['embedding'])
      self.wpe = of(params['wpe']['embedding'])
      self.layers = nn.ModuleList(
          Layer(params[f'h_{i}']) for i in range(config.n_layers)
      )
      self.ln_f = norm(params['ln_f'])

    def forward(self, tokens: Any) -> Any:
      x = functional.embedding(tokens, self.wte) + self.wpe[:tokens.shape[1]]
      for layer in self.layers:
        x = layer(x)
      return functional.linear(self.ln_f(x), self.wte)

  return GPT()


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
  torch.set_num_threads(processor.cores())
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
