"""Circuits: the fewest nodes of a model that solve a task.

After Gao et al., 2025: nodes are channels of the activations that layers read
and write. A node outside of the circuit has its mean over the corpus. Masks of
nodes are learned: a node is in if its threshold is positive, and gradients pass
as those of a sigmoid; the price of a node follows the loss, to hold it at a
target. Then nodes are ranked by their thresholds, and the fewest are kept that
reach the target.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.weight_sparse import model as models
from experiments.weight_sparse.tasks import Prompts

PyTree = Any
Nodes = Mapping[str, Any]
"""An array over channels for each location, e.g. `'h_0/mlp_neuron'`."""


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
    target: float,
    steps: int,
    pairs: int = 32,
    rate: float = 0.1,
) -> dict[str, jax.Array]:
  """Learns which nodes a task needs.

  Minimizes the task's loss plus a price of each node, which rises while the
  loss is lower than `target`, and falls while it is higher.

  Args:
    model: The model.
    params: Parameters of the model.
    means: Means of all nodes.
    prompts: Prompts to learn from.
    target: The loss of the task to hold, in nats.
    steps: Number of steps of Adam.
    pairs: Pairs of prompts in a step, drawn at random.
    rate: Learning rate of Adam.

  Returns:
    The thresholds; the larger, the more a node is needed.
  """
  tx = optax.adam(rate)
  pairs = min(pairs, len(prompts.tokens) // 2)

  def objective(thresholds, price, key):
    batch_key, noise_key = jax.random.split(key)
    first = 2 * jax.random.choice(
        batch_key, len(prompts.tokens) // 2, (pairs,), replace=False
    )
    chosen = jnp.concatenate([first, first + 1])
    # Noise, because of nodes that are needed together none has a gradient once
    # two of them are out.
    noise = optax.tree.random_like(noise_key, thresholds, jax.random.logistic)
    gates = jax.tree.map(
        lambda t, n: step_function(t + n), thresholds, noise
    )
    logits = ablated_logits(
        model, params, means, gates, jnp.asarray(prompts.tokens)[chosen]
    )
    loss = task_loss(logits, jnp.asarray(prompts.answers)[chosen])
    return loss + price * sum(jnp.sum(g) for g in gates.values()), loss

  def step(carry, key):
    thresholds, state, log_price = carry
    grads, loss = jax.grad(objective, has_aux=True)(
        thresholds, jnp.exp(log_price), key
    )
    updates, state = tx.update(grads, state)
    thresholds = optax.apply_updates(thresholds, updates)
    # Bounded, so that gradients do not vanish.
    thresholds = jax.tree.map(lambda t: jnp.clip(t, -4, 4), thresholds)
    log_price += 0.05 * jnp.clip(target / loss - 1, -1, 1)
    return (thresholds, state, log_price), None

  @jax.jit
  def learn(keys):
    thresholds = {
        name: jnp.full(size, 2.0) for name, size in locations(model).items()
    }
    carry = thresholds, tx.init(thresholds), jnp.log(3e-4)
    return jax.lax.scan(step, carry, keys)[0][0]

  return learn(jax.random.split(jax.random.key(0), steps))


def smallest(
    model: models.WeightSparseGPT,
    params: PyTree,
    means: Nodes,
    thresholds: Nodes,
    prompts: Prompts,
    target: float,
) -> Circuit:
  """Returns the smallest circuit found that reaches a loss.

  Args:
    model: The model.
    params: Parameters of the model.
    means: Means of all nodes.
    thresholds: Thresholds, whose order is that of the nodes.
    prompts: Prompts to evaluate on.
    target: The loss of the task to reach, which all nodes together reach.

  Returns:
    The circuit: the fewest nodes by bisection, without those that can be left
    out one by one.
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
    steps: int = 400,
) -> Circuit | None:
  """Finds a small circuit of a task at a loss.

  Args:
    model: The model.
    params: Parameters of the model.
    corpus: Tokens [N, L] over which nodes have their means.
    train: Prompts from which thresholds are learned.
    test: Prompts on which the fewest nodes are chosen.
    target: The loss of the task to reach.
    steps: Steps of learning.

  Returns:
    The circuit; `None` if the model does not reach the loss with all nodes.
  """
  if solved(model, params, test)[0] > target:
    return None
  means = mean_activations(model, params, corpus)
  thresholds = learn_thresholds(
      model, params, means, train, target=target, steps=steps
  )
  return smallest(model, params, means, thresholds, test, target)
