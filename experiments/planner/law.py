"""Sparse scaling laws: forms, fits, held-out errors and resamples."""

from collections.abc import Callable, Sequence
import itertools
import statistics
from typing import Any, NamedTuple

import numpy as np

FEWEST = 6
"""Smallest number of configurations: one more than `AVERAGE` has parameters."""

EXPONENTS = tuple(np.geomspace(0.05, 5, 11).tolist())
"""Grid of exponents, from which the search begins."""


class Point(NamedTuple):
  """A configuration: finished runs that differ in seed and learning rate only.

  Attributes:
    kind: Sparsity in words: `'dense'`, `'75%'`, `'90% to 0%'`.
    weights: Number of weights in the hidden matrices.
    sparsity: Mean sparsity over training.
    tokens: Number of training tokens.
    flops: Training FLOPs of a run.
    losses: Final validation losses of the runs, in nats per token.
  """

  kind: str
  weights: int
  sparsity: float
  tokens: float
  flops: float
  losses: tuple[float, ...]

  @property
  def loss(self) -> float:
    """Mean of the losses."""
    return statistics.fmean(self.losses)


class Form(NamedTuple):
  """A law, a sum of terms: amplitudes, all at least 0, times functions.

  Attributes:
    name: Name of the form.
    text: The law as a formula.
    source: The paper that states it.
    exponents: Names of the exponents.
    amplitudes: Names of the amplitudes.
    terms: Function `(exponents, weights, sparsity, tokens) -> [N, K]` that
      returns the functions at N points, without their K amplitudes.
  """

  name: str
  text: str
  source: str
  exponents: tuple[str, ...]
  amplitudes: tuple[str, ...]
  terms: Callable[..., np.ndarray]

  @property
  def parameters(self) -> tuple[str, ...]:
    """Names of the exponents, and of the amplitudes."""
    return self.exponents + self.amplitudes


def _sparse_terms(exponents, weights, sparsity, tokens) -> np.ndarray:
  b_s, b_n, b_d = exponents
  kept = (weights * (1 - sparsity)) ** -b_n
  return np.stack(
      [(1 - sparsity) ** b_s * kept, kept, tokens**-b_d, np.ones_like(kept)], 1
  )


def _average_terms(exponents, weights, sparsity, tokens) -> np.ndarray:
  alpha, beta = exponents
  kept = (weights * (1 - sparsity)) ** -alpha
  return np.stack([kept, tokens**-beta, np.ones_like(kept)], 1)


SPARSE = Form(
    'sparsity', 'L = (a_S (1 - S)^b_S + c_S) N^-b_N + a_D D^-b_D + c',
    'Frantar et al. 2023', ('b_S', 'b_N', 'b_D'), ('a_S', 'c_S', 'a_D', 'c'),
    _sparse_terms,
)
"""Scaling law of Frantar et al. 2023, "Scaling Laws for Sparsely-Connected
Foundation Models", whose a_D is a_D^(1 / b_D) here. S is the mean sparsity over
training, N the mean number of kept weights in the hidden matrices, and D the
number of tokens."""

AVERAGE = Form(
    'average', 'L = A N^-alpha + B D^-beta + E', 'Jin et al. 2025',
    ('alpha', 'beta'), ('A', 'B', 'E'), _average_terms,
)
"""Scaling law of Jin et al. 2025, "The Journey Matters: Average Parameter Count
over Pre-training": that of Hoffmann et al. 2022 with the mean number N of kept
weights."""


class Law(NamedTuple):
  """A form with its parameters.

  Attributes:
    form: The form.
    exponents: Values of the exponents.
    amplitudes: Values of the amplitudes.
  """

  form: Form
  exponents: np.ndarray
  amplitudes: np.ndarray

  def predict(self, weights, sparsity, tokens) -> np.ndarray:
    """Returns the losses of N configurations, float64 [N].

    Example:
      >>> law = Law(AVERAGE, np.array([0.5, 1.0]), np.array([3.0, 20.0, 1.0]))
      >>> law.predict(np.array([36.0]), np.array([0.75]), np.array([40.0]))
      array([2.5])
    """
    terms = self.form.terms(
        self.exponents, *map(np.asarray, (weights, sparsity, tokens))
    )
    return terms @ self.amplitudes

  @property
  def values(self) -> np.ndarray:
    """Values in the order of `form.parameters`."""
    return np.concatenate([self.exponents, self.amplitudes])


def columns(points: Sequence[Any]) -> tuple[np.ndarray, ...]:
  """Returns the attributes of points that laws depend on, each [N]."""
  return tuple(
      np.array([getattr(p, name) for p in points], np.float64)
      for name in ('weights', 'sparsity', 'tokens')
  )


def fit(form: Form, points: Sequence[Point]) -> Law:
  """Fits a law to configurations by least squares of their mean losses.

  For given exponents the best amplitudes are those of non-negative least
  squares; the exponents are searched on a grid, and then by Nelder and Mead.

  Args:
    form: The form.
    points: The configurations.

  Returns:
    The law.
  """
  from scipy import optimize  # jax needs scipy.

  where, losses = columns(points), np.array([p.loss for p in points])

  def solve(exponents):
    terms = form.terms(exponents, *where)
    norms = np.linalg.norm(terms, axis=0)
    found, error = optimize.nnls(terms / norms, losses)
    return error, found / norms

  error = lambda logarithms: solve(np.exp(logarithms))[0]
  grid = itertools.product(np.log(EXPONENTS), repeat=len(form.exponents))
  found = optimize.minimize(
      error, min(grid, key=error), method='Nelder-Mead',
      bounds=[(np.log(EXPONENTS[0]), np.log(EXPONENTS[-1]))]
      * len(form.exponents),
      options=dict(xatol=1e-6, fatol=1e-9),
  )
  exponents = np.exp(found.x)
  return Law(form, exponents, solve(exponents)[1])


class Fitted(NamedTuple):
  """A law fitted to all configurations, and predictions without each.

  Attributes:
    law: The law.
    residuals: Predicted less measured loss of each configuration.
    held_out: The same, of laws that are fitted without the configuration.
  """

  law: Law
  residuals: np.ndarray
  held_out: np.ndarray

  @property
  def error(self) -> float:
    """Root mean square of the held-out residuals, in nats."""
    return rms(self.held_out)


def rms(residuals: np.ndarray) -> float:
  """Returns the root of the mean square.

  Example:
    >>> rms(np.array([3.0, 4.0, 0.0, 0.0]))
    2.5
  """
  return float(np.sqrt(np.mean(np.square(residuals))))


def fit_all(points: Sequence[Point]) -> list[Fitted]:
  """Fits the laws that have fewer parameters than there are configurations.

  Args:
    points: The configurations.

  Returns:
    The fits, the one of least held-out error first.

  Raises:
    ValueError: there are fewer than six configurations.
  """
  if len(points) < FEWEST:
    raise ValueError(
        f'runs has {len(points)} configurations, and a law needs at least '
        f'{FEWEST} that differ in size, sparsity or tokens; give more runs.'
    )
  losses = np.array([p.loss for p in points])
  found = []
  for form in (AVERAGE, SPARSE):
    if len(form.parameters) < len(points):
      law = fit(form, points)
      without = [
          fit(form, [*points[:i], *points[i + 1 :]]).predict(*columns([p]))[0]
          for i, p in enumerate(points)
      ]
      residuals = law.predict(*columns(points)) - losses
      found.append(Fitted(law, residuals, np.array(without) - losses))
  return sorted(found, key=lambda fitted: fitted.error)


def resample(form: Form, points: Sequence[Point], number: int) -> list[Law]:
  """Fits a law to bootstrap samples of the configurations.

  Args:
    form: The form.
    points: The configurations.
    number: Number of samples.

  Returns:
    The laws; the samples are the same in every call.
  """
  rng = np.random.default_rng(0)
  samples = rng.integers(len(points), size=(number, len(points)))
  return [fit(form, [points[i] for i in sample]) for sample in samples]


def interval(values: Sequence[float]) -> tuple[float, float]:
  """Returns the 2.5th and 97.5th percentiles of resampled values.

  Example:
    >>> interval(range(1001))
    (25.0, 975.0)
  """
  low, high = np.percentile(values, [2.5, 97.5])
  return float(low), float(high)
