"""PyTorch: its training steps beside ours, and its decoding.

In the suite `peers` a GPT with four layers takes steps on four sequences of 256
tokens with AdamW, from the same parameters: in PyTorch, eager and compiled by
`torch.compile`, and here, dense and with kept values only at 75 and 90 %
sparsity; each in float32 and, where there are kernels of it, bfloat16, there
also with masks of 32 x 32 blocks. All take turns. The first losses of the dense
steps are compared, which shows that they compute the same.

Targets in the model of width 768: over PyTorch's fastest step, ours in its
faster dtype is at least 0.8 times as fast dense, 1.9 times at 75 % and 2.7
times at 90 %; in float32, over PyTorch's fastest in float32, 1.0, 2.5 and 3.9
times. With AMX, blocks over the fastest dense step in bfloat16, PyTorch's or
ours: 1.2, 1.6 and 2.0 times at 50, 75 and 90 %.

The GPT in PyTorch is written as a user of PyTorch writes it. PyTorch is
imported when it is used; it is not among the extras. Without it the suite is
skipped with a warning. jaxpruner is not measured: it calls `jax.tree_map`,
which current versions of JAX no longer have.
"""

from collections.abc import Callable, Iterator, Mapping
import functools
import importlib.metadata
import importlib.util
import logging
from typing import Any

import jax
import numpy as np

from experiments.benchmarks import compiled
from experiments.benchmarks import machine
from experiments.benchmarks import measuring
from experiments.benchmarks import small_gpts
from experiments.benchmarks import train_step
from spdf_jax import extras
from spdf_jax import models
from spdf_jax.accelerator import native
from spdf_jax.accelerator import processor
from spdf_jax.sparsity import structures

PyTree = Any

_OVER_FASTEST = {0.0: 0.8, 0.75: 1.9, 0.9: 2.7}
"""Smallest speed-up of our faster dtype over PyTorch's fastest step."""
_IN_FLOAT32 = {0.0: 1.0, 0.75: 2.5, 0.9: 3.9}
"""Smallest speed-up in float32 over PyTorch's fastest step in float32."""
_IN_BLOCKS = {0.5: 1.2, 0.75: 1.6, 0.9: 2.0}
"""Smallest speed-up of blocks over the fastest dense step in bfloat16."""
_LARGEST_DIFFERENCE = {'float32': 1e-4, 'bfloat16': 2e-2}
"""Largest difference of the first loss from PyTorch's in float32, by dtype."""
CASES = (
    small_gpts.CASES[2]._replace(name='width 512'),
    train_step.WIDE._replace(name='width 768'),
)
MISSING = (
    'PyTorch is not installed, so it is not measured; use `pip install torch`.'
)
"""Warning of suites that measure PyTorch, without it."""


def measure(repeats: int, rng: np.random.Generator) -> Iterator[measuring.Row]:
  """Measures all cases.

  Args:
    repeats: Rounds of timing.
    rng: Random generator of tokens and the bootstrap.

  Yields:
    Rows.
  """
  if not is_installed():
    logging.warning(MISSING)
    return
  for case in CASES:
    yield from measure_case(case, repeats, rng)


def measure_case(
    case: small_gpts.Case, repeats: int, rng: np.random.Generator
) -> Iterator[measuring.Row]:
  """Measures the steps of one model; see `measure`."""
  subject = small_gpts.create_subject(case, rng)
  calls: dict[tuple[str, ...], Callable[[], Any]] = {}
  for dtype in machine.dtypes():
    for mode in ('eager', 'compiled'):
      calls['PyTorch', dtype, mode] = _torch_step(subject, dtype, mode)
    for sparsity in _OVER_FASTEST:
      calls['ours', dtype, f'{sparsity:.0%} zeros'] = compiled.repeated(
          small_gpts.compile_native_step(subject, case, dtype, sparsity)
      )
  in_blocks = {
      sparsity: ('ours', 'bfloat16', f'{sparsity:.0%} zeros in blocks')
      for sparsity in _IN_BLOCKS if 'bfloat16' in machine.dtypes()
  }
  for sparsity, key in in_blocks.items():
    calls[key] = compiled.repeated(small_gpts.compile_native_step(
        subject, case, 'bfloat16', sparsity, structures.block(32, 32)
    ))
  first = {}
  for key, call in calls.items():  # Compiles and warms up.
    result = call()
    first[key] = float(
        result if key[0] == 'PyTorch' else result[1]['train/loss']
    )
    call()
  timings = measuring.interleave(list(calls.values()), repeats, warmups=1)
  wall = dict(zip(calls, timings.wall))
  for key, seconds in wall.items():
    yield measuring.sampled_row(
        case.name, ' '.join(key) + ', wall ms', 1e3 * seconds, rng
    )
  fastest = lambda keys: min(keys, key=lambda key: np.median(wall[key]))
  peers = [key for key in wall if key[0] == 'PyTorch']
  row = functools.partial(
      measuring.sampled_row, case.name, rng=rng, at_most=False
  )
  for sparsity, target in _OVER_FASTEST.items():
    zeros = f'{sparsity:.0%} zeros'
    peer = fastest(peers)
    own = fastest([('ours', dtype, zeros) for dtype in machine.dtypes()])
    yield row(
        f'{zeros}: {" ".join(peer)} / ours {own[1]}',
        samples=wall[peer] / wall[own],
        target=target if case.name == 'width 768' else None,
    )
    peer = fastest([key for key in peers if key[1] == 'float32'])
    yield row(
        f'{zeros}: {" ".join(peer)} / ours float32',
        samples=wall[peer] / wall['ours', 'float32', zeros],
        target=_IN_FLOAT32[sparsity] if case.name == 'width 768' else None,
    )
  for sparsity, key in in_blocks.items():
    peer = fastest([
        key for key in wall
        if key[1] == 'bfloat16' and key[2] in ('eager', 'compiled', '0% zeros')
    ])
    has_target = case.name == 'width 768' and native.has_matrix_unit()
    yield row(
        f'{key[2]}: {" ".join(peer)} / ours bfloat16',
        samples=wall[peer] / wall[key],
        target=_IN_BLOCKS[sparsity] if has_target else None,
    )
  reference = first['PyTorch', 'float32', 'eager']
  for key, loss in first.items():
    if key[2] in ('eager', 'compiled', '0% zeros'):
      yield measuring.counted_row(
          case.name, ' '.join(key) + ', difference of the first loss',
          abs(loss - reference), target=_LARGEST_DIFFERENCE[key[1]],
      )


def _torch_step(
    subject: small_gpts.Subject, dtype: str, mode: str
) -> Callable[[], float]:
  plan = subject.plan
  return create_step(
      subject.model.config,
      subject.params,
      subject.batch,
      dtype=dtype,
      is_compiled=mode == 'compiled',
      learning_rate=float(plan.learning_rate(1)),
      weight_decay=plan.phases[0].weight_decay,
      **subject.settings,
  )


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
