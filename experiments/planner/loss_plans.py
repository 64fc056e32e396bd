"""Plans of least loss by a scaling law: width, sparsity, tokens and stages."""

from collections.abc import Sequence
import dataclasses
from typing import Any, NamedTuple

import numpy as np

from experiments.planner import law as laws
from experiments.planner import stages
from experiments.planner.finished import Setting
from experiments.planner.law import Fitted
from experiments.planner.law import Law
from experiments.planner.law import Point
from spdf_jax import costs
from spdf_jax import models
from spdf_jax.runs import markdown
from spdf_jax.runs import style

BEYOND = 4
"""Largest factor by which plans exceed the runs of a law unless asked to."""


class Candidate(NamedTuple):
  """A pre-training that takes the budget.

  Attributes:
    sizes: Sizes of the model.
    sparsity: Mean sparsity over training.
    tokens: Number of tokens.
  """

  sizes: models.DecoderConfig
  sparsity: float
  tokens: float

  @property
  def weights(self) -> int:
    """Number of weights in the hidden matrices."""
    return self.sizes.n_layers * self.sizes.hidden_weights


def find_candidates(
    points: Sequence[Point], setting: Setting, flops: float,
    tokens: float | None, sparsities: Sequence[float], extrapolate: bool,
) -> list[Candidate]:
  """Returns the pre-trainings that take a budget of FLOPs.

  Models are those of the setting at other widths, in whole heads. Their weights
  and tokens are between a quarter of the runs' least and four times the most.

  Args:
    points: The configurations of a law.
    setting: Their setting.
    flops: Budget in FLOPs.
    tokens: Number of tokens, which determines the sparsity of each width;
      `None`: for each sparsity as many as the budget allows.
    sparsities: Mean sparsities; those above the runs' are left out.
    extrapolate: Whether FLOPs and tokens may be more than four times those of
      any run.

  Raises:
    ValueError: the budget is beyond the runs, no candidate meets it, or the
      width of the model cannot be changed.
  """
  sizes = setting.sizes
  if not isinstance(sizes, models.DecoderConfig):
    raise ValueError(
        f'the model of runs has {type(sizes).__name__}, whose width cannot be '
        'planned; give runs of a GPT or a Llama.'
    )
  limit = np.inf if extrapolate else BEYOND
  weights, zeros, lengths = laws.columns(points)
  largest = max(point.flops for point in points)
  if not 0 < flops <= limit * largest:
    raise ValueError(
        f'flops is {flops:.4g}, and the runs of the law have up to '
        f'{largest:.4g}; give at most {BEYOND} times that, larger runs or '
        '--extrapolate.'
    )
  head, ratio = sizes.d_model // sizes.n_heads, sizes.d_ff / sizes.d_model
  found = []
  for heads in range(1, 1 + BEYOND * sizes.n_heads):
    width = heads * head
    model = dataclasses.replace(
        sizes, n_heads=heads, d_model=width, d_ff=round(ratio * width)
    )
    cost = lambda sparsity, model=model: costs.training_flops(
        model, setting.length, sparsity
    ) / setting.length
    if tokens is None:
      found += [
          Candidate(model, s, flops / cost(s))
          for s in (0.0, *sparsities) if s <= zeros.max()
      ]
    else:
      sparsity = stages.least_sparsity(
          lambda s, cost=cost: tokens * cost(s), flops, zeros.max()
      )
      found += [] if sparsity is None else [Candidate(model, sparsity, tokens)]
  found = [
      c for c in found
      if weights.min() / BEYOND <= c.weights <= BEYOND * weights.max()
      and lengths.min() / BEYOND <= c.tokens <= limit * lengths.max()
  ]
  if not found:
    given = '' if tokens is None else f' and tokens is {tokens:.4g}'
    raise ValueError(
        f'flops is {flops:.4g}{given}, which no model takes whose weights and '
        f'tokens are within {BEYOND} times those of the runs; give another '
        'budget.'
    )
  return found


def describe_fits(
    points: Sequence[Point], fits: Sequence[Fitted], resampled: Sequence[Law]
) -> str:
  """Describes the laws and the parameters of the first, in Markdown.

  Args:
    points: The configurations.
    fits: The laws, the best one first.
    resampled: Resamples of the best one.
  """
  losses = np.array([point.loss for point in points])
  others = (losses.sum() - losses) / (len(losses) - 1)
  errors = [
      (f'{f.law.form.name} ({f.law.form.source})', len(f.law.form.parameters),
       laws.rms(f.residuals), f.error)
      for f in fits
  ] + [('mean of the others', 1, losses.std(), laws.rms(others - losses))]
  best = fits[0].law
  spans = map(_span, np.stack([each.values for each in resampled]).T)
  number = lambda names, rows: markdown.markdown_table(
      names, rows, numbers=names[1:]
  )
  return '\n\n'.join([
      number(
          ['law', 'parameters', 'error of the fit', 'held out'],
          [[name, str(n), f'{fit:.4f}', f'{out:.4f}']
           for name, n, fit, out in errors],
      ),
      'Errors are root mean squares over configurations, in nats; held out: of '
      'laws fitted to the others. Exponents are searched from '
      f'{laws.EXPONENTS[0]:g} to {laws.EXPONENTS[-1]:g}.',
      best.form.text,
      number(
          ['parameter', 'value', '95 % interval'],
          [[name, f'{value:.4g}', span] for name, value, span in zip(
              best.form.parameters, best.values, spans
          )],
      ),
  ])


def _span(values: Sequence[float]) -> str:
  return ' to '.join(f'{value:.4g}' for value in laws.interval(values))


def describe_candidates(
    candidates: Sequence[Candidate], law: Law, resampled: Sequence[Law]
) -> tuple[str, Candidate]:
  """Describes the best candidate of each sparsity, in Markdown.

  Args:
    candidates: The candidates.
    law: The law.
    resampled: Resamples of the law.

  Returns:
    The text, and the candidate of least loss.
  """
  where = laws.columns(candidates)
  losses = law.predict(*where)
  samples = np.stack([each.predict(*where) for each in resampled])
  ranked: dict[float, int] = {}
  for i in np.argsort(losses):  # The best one of each sparsity.
    ranked.setdefault(candidates[i].sparsity, int(i))
  dense = ranked.get(0.0)
  rows = []
  for sparsity, i in sorted(ranked.items()):
    gap = markdown.MISSING
    if sparsity and dense is not None:
      gap = (
          f'{losses[i] - losses[dense]:+.4f} '
          f'({_span(samples[:, i] - samples[:, dense])})'
      )
    rows.append([
        markdown.percent(sparsity), str(candidates[i].sizes.d_model),
        f'{candidates[i].tokens:.4g}',
        f'{losses[i]:.4f} ({_span(samples[:, i])})', gap,
    ])
  best = candidates[int(np.argmin(losses))]
  chosen = [candidates[i] for i in np.argmin(samples, axis=1)]
  columns = ['mean sparsity', 'width', 'tokens', 'loss', 'less dense']
  return (
      f'{markdown.markdown_table(columns, rows, numbers=columns)}\n\n'
      f'Least loss: model.d_model={best.sizes.d_model}, '
      f'model.n_heads={best.sizes.n_heads}, model.d_ff={best.sizes.d_ff}, '
      f'{markdown.percent(best.sparsity)} sparse, {best.tokens:.4g} tokens. '
      'Of the resampled laws 95 % choose a width of '
      f'{_span([c.sizes.d_model for c in chosen])} and a sparsity of '
      f'{_span([100 * c.sparsity for c in chosen])} %.'
  ), best


def describe_stages(
    best: Candidate, setting: Setting, sparsities: Sequence[float],
    dense_share: float,
) -> str:
  """Describes the stages of a candidate; see `stages.choose`.

  Its loss depends on the mean sparsity, in which all these plans agree.
  """
  cost = lambda sparsity: setting.batch_size * costs.training_flops(
      best.sizes, setting.length, sparsity
  )
  per_step = setting.batch_size * setting.length
  steps = max(round(best.tokens / per_step), 1)
  plans = stages.plan_stages(
      cost, steps, steps * cost(best.sparsity), sparsities
  )
  return stages.format_plans(
      plans, stages.choose(plans, dense_share), tokens_per_step=per_step,
      flops=cost,
  )


def plot_fit(points: Sequence[Point], fitted: Fitted) -> Any:
  """Plots measured losses over those of a law.

  Args:
    points: The configurations.
    fitted: The law.

  Returns:
    A figure with a panel of the fit and one of predictions of configurations
    that the law was not fitted to. Small points are runs, large ones means.
  """
  figure = style.new_figure(9, 4.2)
  panels = figure.subplots(1, 2, sharey=True)
  kinds = sorted({p.kind for p in points}, key=lambda k: (k != 'dense', k))
  for ax, title, residuals in zip(
      panels, ('fit', 'held out'), (fitted.residuals, fitted.held_out)
  ):
    for point, residual in zip(points, residuals):
      color = style.line_style(kinds.index(point.kind))['color']
      x = point.loss + residual
      ax.plot([x] * len(point.losses), point.losses, 'o', color=color,
              alpha=0.35, markersize=4, markeredgewidth=0)
      ax.plot(x, point.loss, 'o', color=color, markersize=7)
    ends = ax.dataLim.min.min(), ax.dataLim.max.max()
    ax.plot(ends, ends, color=style.PALE, linewidth=1, zorder=0)
    ax.set_title(f'{title}: {laws.rms(residuals):.3f} nats', fontsize=10)
    ax.set_xlabel('predicted loss (nats per token)')
    style.polish(ax)
  for i, kind in enumerate(kinds):
    panels[0].plot([], [], 'o', color=style.line_style(i)['color'], label=kind)
  panels[0].set_ylabel('measured loss (nats per token)')
  panels[0].legend(frameon=False, fontsize=8)
  return figure


def describe_points(
    points: Sequence[Point], fits: Sequence[Fitted]
) -> dict[str, Any]:
  """Returns configurations and laws as JSON-serializable data."""
  return {
      'configurations': [point._asdict() for point in points],
      'laws': {
          f.law.form.name: {
              'law': f.law.form.text,
              **dict(zip(f.law.form.parameters, f.law.values.tolist())),
              'residuals': f.residuals.tolist(),
              'held_out': f.held_out.tolist(),
          }
          for f in fits
      },
  }
