"""Circuits: the fewest nodes of a model that solve a task.

After Gao et al., 2025: nodes are channels of the activations that layers read
and write. A node outside of the circuit has its mean over the corpus. Masks of
nodes are learned: a node is in if its threshold is positive, and gradients pass
as those of a sigmoid; then nodes are ranked by their thresholds, and the fewest
are kept that reach a target loss of the task.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.weight_sparse import model as models

PyTree = Any
Nodes = Mapping[str, Any]
"""An array over channels for each location, e.g. `'h_0/mlp_neuron'`."""


class Prompts(NamedTuple):
  """Prompts of a task with two answers, the left one padded by repetition."""

  tokens: np.ndarray
  """Tokens [N, L]; the last is that before the answer."""

  answers: np.ndarray
  """Right and wrong answer [N, 2]."""


@dataclasses.dataclass(frozen=True)
class Circuit:
  """The nodes that solve a task, and what they reach.

  Attributes:
    nodes: Indices of the channels in the circuit, by location.
    loss: Loss of the task with these nodes only, in nats.
    accuracy: Share of prompts whose right answer is likelier than the wrong.
    edges: Number of nonzero weights between nodes.
  """

  nodes: Mapping[str, Sequence[int]]
  loss: float
  accuracy: float
  edges: int

  @property
  def size(self) -> int:
    """Number of nodes."""
    return sum(map(len, self.nodes.values()))


def locations(model: models.WeightSparseGPT) -> dict[str, int]:
  """Returns the number of channels of each location, in order of computation.

  Example:
    >>> model, _ = models.make_model(
    ...     vocab_size=8, d_model=16, max_length=4, n_layers=1)
    >>> list(locations(model).items())[:2]
    [('h_0/attn_in', 16), ('h_0/attn_q', 16)]
  """
  heads = model.n_heads * model.head_size
  sizes = dict(
      attn_in=model.d_model, attn_q=heads, attn_k=heads, attn_v=heads,
      attn_out=model.d_model, mlp_in=model.d_model, mlp_neuron=model.d_ff,
      mlp_out=model.d_model,
  )
  return {
      f'h_{i}/{name}': size for i in range(model.n_layers)
      for name, size in sizes.items()
  } | {'resid_final': model.d_model}


def mean_activations(
    model: models.WeightSparseGPT, params: PyTree, tokens: np.ndarray
) -> dict[str, jax.Array]:
  """Returns the mean of each channel over tokens [N, L] of the corpus."""
  wanted = locations(model)

  def means(tokens):
    found = {}

    def read(name, x):
      if name in wanted:
        found[name] = jnp.mean(x, axis=(0, 1))
      return x

    model.clone(read=read).apply({'params': params}, tokens)
    return found

  return jax.jit(means)(jnp.asarray(tokens))


def ablated_logits(
    model: models.WeightSparseGPT,
    params: PyTree,
    means: Nodes,
    gates: Nodes,
    tokens: jax.Array,
) -> jax.Array:
  """Returns the logits after the last token, with some nodes at their mean.

  Args:
    model: The model.
    params: Parameters of the model.
    means: Means of all nodes, see `mean_activations`.
    gates: 1 for nodes of the circuit, 0 for those at their mean.
    tokens: Tokens [N, L].

  Returns:
    Logits [N, V].
  """
  def read(name, x):
    if name not in gates:
      return x
    return gates[name] * x + (1 - gates[name]) * means[name]

  return model.clone(read=read).apply({'params': params}, tokens)[:, -1]


def task_loss(logits: jax.Array, answers: jax.Array) -> jax.Array:
  """Returns the mean cross-entropy of the right of two answers."""
  pair = jnp.take_along_axis(logits, answers, axis=-1)
  return -jnp.mean(jax.nn.log_softmax(pair)[:, 0])


def accuracy(logits: jax.Array, answers: jax.Array) -> jax.Array:
  """Returns the share of prompts whose right answer is the likelier one."""
  pair = jnp.take_along_axis(logits, answers, axis=-1)
  return jnp.mean(pair[:, 0] > pair[:, 1])


@jax.custom_jvp
def step_function(x: jax.Array) -> jax.Array:
  """Returns 1 where x is positive, with the gradient of a sigmoid."""
  return (x > 0).astype(x.dtype)


@step_function.defjvp
def _step_jvp(primals, tangents):
  (x,), (dx,) = primals, tangents
  s = jax.nn.sigmoid(x)
  return step_function(x), s * (1 - s) * dx


def learn_thresholds(
    model: models.WeightSparseGPT,
    params: PyTree,
    means: Nodes,
    prompts: Prompts,
    *,
    penalty: float,
    steps: int,
    rate: float = 0.1,
) -> dict[str, jax.Array]:
  """Learns which nodes a task needs.

  Minimizes the task's loss plus `penalty` times the number of nodes in units of
  a hundred.

  Args:
    model: The model.
    params: Parameters of the model.
    means: Means of all nodes.
    prompts: Prompts to learn from, all in each step.
    penalty: Price of a hundred nodes, in nats.
    steps: Number of steps of Adam.
    rate: Learning rate of Adam.

  Returns:
    The thresholds; the larger, the more a node is needed.
  """
  tx = optax.adam(rate)
  thresholds = {
      name: jnp.full(size, 2.0) for name, size in locations(model).items()
  }

  def objective(thresholds, key):
    # Noise, because of nodes that are needed together none has a gradient once
    # two of them are out.
    noise = optax.tree.random_like(key, thresholds, jax.random.logistic)
    gates = jax.tree.map(
        lambda t, n: step_function(t + n), thresholds, noise
    )
    logits = ablated_logits(model, params, means, gates, prompts.tokens)
    number = sum(jnp.sum(g) for g in gates.values())
    return task_loss(logits, prompts.answers) + penalty / 100 * number

  @jax.jit
  def step(thresholds, state, key):
    grads = jax.grad(objective)(thresholds, key)
    updates, state = tx.update(grads, state)
    new = optax.apply_updates(thresholds, updates)
    # Bounded, so that gradients do not vanish.
    return jax.tree.map(lambda t: jnp.clip(t, -4, 4), new), state

  state = tx.init(thresholds)
  for key in jax.random.split(jax.random.key(0), steps):
    thresholds, state = step(thresholds, state, key)
  return thresholds


def smallest(
    model: models.WeightSparseGPT,
    params: PyTree,
    means: Nodes,
    thresholds: Nodes,
    prompts: Prompts,
    target: float,
) -> Circuit | None:
  """Returns the smallest circuit found that reaches a loss.

  Args:
    model: The model.
    params: Parameters of the model.
    means: Means of all nodes.
    thresholds: Thresholds, whose order is that of the nodes.
    prompts: Prompts to evaluate on.
    target: The loss of the task to reach.

  Returns:
    The circuit: the fewest nodes by bisection, without those that can be left
    out one by one; `None` if all nodes together do not reach the loss.
  """
  names = list(locations(model))
  ranked = np.argsort(-np.concatenate(
      [np.asarray(thresholds[name]) for name in names]
  ), kind='stable')
  ends = np.cumsum([len(thresholds[name]) for name in names])[:-1]

  @jax.jit
  def measure(gates):
    logits = ablated_logits(model, params, means, gates, prompts.tokens)
    return (
        task_loss(logits, prompts.answers), accuracy(logits, prompts.answers)
    )

  def first(number):
    chosen = np.zeros(len(ranked), np.float32)
    chosen[ranked[:number]] = 1
    return dict(zip(names, np.split(chosen, ends)))

  low, high = 0, len(ranked)
  if float(measure(first(high))[0]) > target:
    return None
  while high - low > 1:
    middle = (low + high) // 2
    if float(measure(first(middle))[0]) <= target:
      high = middle
    else:
      low = middle
  gates = _without_needless(names, first(high), ranked[:high], measure, target)
  loss, right = map(float, measure(gates))
  nodes = {
      name: np.flatnonzero(gate).tolist() for name, gate in gates.items()
  }
  return Circuit(nodes, loss, right, len(edges(model, params, nodes)))


def _without_needless(
    names: Sequence[str],
    gates: dict[str, np.ndarray],
    chosen: np.ndarray,
    measure: Callable[[Nodes], Any],
    target: float,
) -> dict[str, np.ndarray]:
  """Leaves out nodes, the last first, without which the target holds."""
  ends = np.cumsum([len(gates[name]) for name in names])
  for node in chosen[::-1].tolist():
    where = int(np.searchsorted(ends, node, side='right'))
    channel = node - (ends[where - 1] if where else 0)
    fewer = gates | {names[where]: gates[names[where]].copy()}
    fewer[names[where]][channel] = 0
    if float(measure(fewer)[0]) <= target:
      gates = fewer
  return gates


class Edge(NamedTuple):
  """A nonzero weight between two nodes."""

  source: tuple[str, int]
  target: tuple[str, int]
  weight: float


def edges(
    model: models.WeightSparseGPT,
    params: PyTree,
    nodes: Mapping[str, Sequence[int]],
) -> list[Edge]:
  """Returns the nonzero weights between nodes of a circuit.

  Args:
    model: The model.
    params: Parameters of the model.
    nodes: Indices of channels, by location.

  Returns:
    The edges of the matrices within layers, in order of computation. Queries,
    keys and values lead to the outputs of attention through the values.
  """
  heads, found = model.n_heads * model.head_size, []
  for i in range(model.n_layers):
    qkv = np.asarray(params[f'h_{i}_qkv']['kernel'])
    parts = (
        ('attn_in', 'attn_q', qkv[:, :heads]),
        ('attn_in', 'attn_k', qkv[:, heads:2 * heads]),
        ('attn_in', 'attn_v', qkv[:, 2 * heads:]),
        ('attn_v', 'attn_out', np.asarray(params[f'h_{i}_out']['kernel'])),
        ('mlp_in', 'mlp_neuron', np.asarray(params[f'h_{i}_wi']['kernel'])),
        ('mlp_neuron', 'mlp_out', np.asarray(params[f'h_{i}_wo']['kernel'])),
    )
    for source, target, matrix in parts:
      source, target = f'h_{i}/{source}', f'h_{i}/{target}'
      for a in nodes[source]:
        for b in nodes[target]:
          if matrix[a, b]:
            found.append(Edge((source, a), (target, b), float(matrix[a, b])))
  return found


def quote_prompts(
    encode: Callable[[str], Sequence[int]], words: Sequence[str], length: int
) -> Prompts:
  """Returns pairs of prompts that end inside a string: close which quote?

  Each word is in two prompts, one opened by `"` and one by `'`, which are equal
  otherwise; a prompt that the tokenizer does not split before its closing quote
  is left out.

  Args:
    encode: Function from a text to tokens.
    words: Words of the strings.
    length: Tokens of a prompt; shorter ones are preceded by newlines.

  Returns:
    The prompts, those of a pair one after the other.

  Raises:
    ValueError: no prompt is left.
  """
  (single,), (double,) = encode("'"), encode('"')
  (newline,) = encode('\n')
  tokens, answers = [], []
  for i, word in enumerate(words):
    opening = ('x = ', 'name = ', 'print(', 'return ')[i % 4]
    pair = []
    for mark, right, wrong in (("'", single, double), ('"', double, single)):
      prompt = list(encode(f'{opening}{mark}{word}'))
      closed = list(encode(f'{opening}{mark}{word}{mark}'))
      if closed == [*prompt, right] and len(prompt) <= length:
        pair.append((prompt, (right, wrong)))
    if len(pair) == 2 and len(pair[0][0]) == len(pair[1][0]):
      for prompt, answer in pair:
        tokens.append([newline] * (length - len(prompt)) + prompt)
        answers.append(answer)
  if not tokens:
    raise ValueError(
        'no word gives a pair of prompts that the tokenizer splits before the '
        'closing quote; give other words, or another tokenizer.'
    )
  return Prompts(np.array(tokens, np.int32), np.array(answers, np.int32))


def solved(
    model: models.WeightSparseGPT, params: PyTree, prompts: Prompts
) -> tuple[float, float]:
  """Returns the loss and the accuracy of a task with all nodes."""
  logits = model.apply({'params': params}, prompts.tokens)[:, -1]
  return (
      float(task_loss(logits, prompts.answers)),
      float(accuracy(logits, prompts.answers)),
  )


def find(
    model: models.WeightSparseGPT,
    params: PyTree,
    corpus: np.ndarray,
    train: Prompts,
    test: Prompts,
    target: float,
    *,
    penalties: Sequence[float] = (0.03, 0.1, 0.3, 1.0),
    steps: int = 300,
) -> Circuit | None:
  """Finds the smallest circuit of a task at a loss, over several penalties.

  Args:
    model: The model.
    params: Parameters of the model.
    corpus: Tokens [N, L] over which nodes have their means.
    train: Prompts from which thresholds are learned.
    test: Prompts on which circuits are compared.
    target: The loss of the task to reach.
    penalties: Prices of a hundred nodes to try.
    steps: Steps of learning for each.

  Returns:
    The circuit; `None` if the model does not reach the loss with all nodes.
  """
  means = mean_activations(model, params, corpus)
  best = None
  for penalty in penalties:
    thresholds = learn_thresholds(
        model, params, means, train, penalty=penalty, steps=steps
    )
    found = smallest(model, params, means, thresholds, test, target)
    if found is None:
      return None
    if best is None or found.size < best.size:
      best = found
  return best
