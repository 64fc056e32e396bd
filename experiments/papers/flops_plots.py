"""Plots of the papers' FLOPs: bars by phase, and reduction over model size."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from experiments.papers import computed_flops
from experiments.papers import flops_tables
from spdf_jax.costs.flops import training_flops
from spdf_jax.models import PRESETS
from spdf_jax.runs import markdown
from spdf_jax.runs import style

DENSE, SPARSE, TUNING = 'dense pre-training', 'sparse pre-training', 'tuning'
_COLORS = {
    SPARSE: style.COLORS[5], DENSE: style.COLORS[0], TUNING: style.COLORS[1]
}
_NAMES = {
    SPARSE: SPARSE, DENSE: DENSE, TUNING: 'fine-tuning (E2E or DART)',
}
_EXA = 1e18
LEVELS = (0.5, 0.75, 0.9)
MODELS = (
    'cerebras-gpt-111m', 'gpt2-small', 'cerebras-gpt-256m',
    'cerebras-gpt-590m', 'gpt3-xl', 'cerebras-gpt-2.7b', 'cerebras-gpt-6.7b',
    'cerebras-gpt-13b', 'gpt3-175b',
)
"""Presets in order of size."""


class Bar(NamedTuple):
  """FLOPs of a recipe of a paper, drawn as a bar.

  Attributes:
    model: Model, the title of the panel.
    label: Label of the bar.
    flops: FLOPs by phase: `DENSE`, `SPARSE` or `TUNING`.
    printed: Total that the paper prints; `None` if it prints none.
  """

  model: str
  label: str
  flops: Mapping[str, float]
  printed: float | None = None

  @property
  def total(self) -> float:
    """FLOPs of all phases."""
    return sum(self.flops.values())


def published_bars() -> list[Bar]:
  """Returns the recipes of SPDF and Variable SPDF with their FLOPs.

  SPDF's totals include fine-tuning on E2E, as in its table 2; those of 6.7B
  include DART. The 256M models read 20 tokens per parameter, a budget that the
  post does not print.

  Example:
    >>> bar = published_bars()[0]
    >>> bar.label, round(bar.total / 1e18, 2), bar.printed / 1e18
    ('dense', 2.48, 2.48)
  """
  bars = []
  for name, sparsity in computed_flops.PRETRAINED:
    flops = {
        SPARSE if sparsity else DENSE: computed_flops.pretraining_flops(
            name, sparsity
        ),
        TUNING: computed_flops.tuning_flops(name, 'E2E'),
    }
    printed = _EXA * flops_tables.printed_value(
        'SPDF, table 2', name, sparsity, 'E2E'
    )
    label = f'static\n{markdown.percent(sparsity)}' if sparsity else 'dense'
    bars.append(Bar(name, label, flops, printed))
  return bars + _small_bars() + _large_bars()


def _small_bars() -> list[Bar]:
  name = computed_flops.V_SMALL
  shape, length = PRESETS[name], computed_flops.LENGTH
  sequences = 20 * computed_flops.parameters_of(name)[0] / length
  cost = lambda sparsity: sequences * training_flops(shape, length, sparsity)
  shares = computed_flops.SPLIT_SHARES
  sparsities = computed_flops.SPLIT_SPARSITIES
  return [
      Bar(name, 'dense', {DENSE: cost(0.0)}),
      Bar(name, 'static\n75%', {SPARSE: cost(0.75)}),
      Bar(name, f'{markdown.percent(sparsities[0])}, then\ndense', {
          SPARSE: shares[0] * cost(sparsities[0]), DENSE: shares[1] * cost(0.0),
      }),
  ]


def _large_bars() -> list[Bar]:
  name = computed_flops.V_LARGE
  shape, length = PRESETS[name], computed_flops.LENGTH
  cost = lambda steps, sparsity: (
      steps * computed_flops.BATCH * training_flops(shape, length, sparsity)
  )
  tuning = computed_flops.large_tuning_flops()
  steps = computed_flops.STAGE_STEPS
  sparsities = computed_flops.STAGE_SPARSITIES
  dense = cost(steps[0], 0.0)
  fewer = flops_tables.printed_value(
      'Variable SPDF, "Scaling" and figure 5', name, 'extended', 'fewer FLOPs'
  )
  return [
      Bar(name, 'dense', {DENSE: dense, TUNING: tuning}),
      Bar(
          name, f'{markdown.percent(sparsities[0])}, then\ndense', {
              SPARSE: cost(steps[0], sparsities[0]),
              DENSE: cost(steps[1], sparsities[1]), TUNING: tuning,
          }, (1 - fewer) * dense,
      ),
  ]


def plot_flops_bars() -> Any:
  """Draws the FLOPs of the papers' recipes by phase, a panel for each model.

  Returns:
    A `matplotlib.figure.Figure`: the number on a bar is its total relative to
    dense training; a black line is the printed total.

  Raises:
    ImportError: matplotlib is not installed.

  References:
    Thangarasa et al. 2023, "SPDF", table 2; Cerebras 2023, "Variable Sparse
    Pre-training", figure 5.

  Example:
    >>> [ax.get_title() for ax in plot_flops_bars().axes][:2]
    ['gpt2-small', 'gpt3-xl']
  """
  bars = published_bars()
  models = list(dict.fromkeys(bar.model for bar in bars))
  groups = [[bar for bar in bars if bar.model == m] for m in models]
  figure = style.new_figure(11, 4)
  panels = figure.subplots(1, len(models), width_ratios=list(map(len, groups)))
  for ax, model, group in zip(panels, models, groups):
    for place, bar in enumerate(group):
      below = 0.0
      for phase, flops in bar.flops.items():
        ax.bar(
            place, flops / _EXA, 0.66, below / _EXA, color=_COLORS[phase],
            linewidth=0,
        )
        below += flops
      top = bar.total
      if bar.printed is not None:
        ax.hlines(
            bar.printed / _EXA, place - 0.4, place + 0.4, color='black',
            linewidth=1.4,
        )
        top = max(top, bar.printed)
      ax.annotate(
          f'{bar.total / group[0].total:.2f} ×', (place, top / _EXA), (0, 3),
          textcoords='offset points', ha='center', va='bottom', fontsize=9,
      )
    style.polish(ax)
    ax.grid(False, axis='x')
    ax.set_xticks(range(len(group)), [bar.label for bar in group], fontsize=8.5)
    ax.set_ylim(0, 1.12 * max(bar.total for bar in group) / _EXA)
    ax.set_xlim(-0.6, len(group) - 0.4)
    ax.set_title(model, fontsize=10)
    ax.tick_params(axis='x', length=0)
  panels[0].set_ylabel('Training FLOPs (10$^{18}$)')
  entries = [
      panels[0].bar([0], [0], color=_COLORS[phase], label=name)
      for phase, name in _NAMES.items()
  ]
  entries += panels[0].plot([], [], color='black', label='total as printed')
  figure.legend(
      handles=entries, loc='outside lower center', ncols=4, frameon=False,
      fontsize=9,
  )
  return figure


def reductions(sparsity: float) -> list[tuple[int, float]]:
  """Returns the reduction of training FLOPs at a sparsity, by model.

  Args:
    sparsity: Fraction of zeros in the hidden matrices.

  Returns:
    Number of parameters and reduction for each model of `MODELS`: the FLOPs of
    a dense sequence of 2,048 tokens over those of a sparse one.

  Example:
    >>> [round(times, 2) for _, times in reductions(0.75)][-1]
    3.66
  """
  points = []
  for name in MODELS:
    shape = PRESETS[name]
    dense = training_flops(shape, computed_flops.LENGTH)
    sparse = training_flops(shape, computed_flops.LENGTH, sparsity)
    points.append((computed_flops.parameters_of(name)[0], dense / sparse))
  return points


def plot_flops_reduction() -> Any:
  """Draws the reduction of training FLOPs over model size.

  The products of queries and keys, of probabilities and values, and of the
  vocabulary stay dense. Their share falls with size, so that the reduction
  rises towards 1 / (1 - sparsity), drawn dashed.

  Returns:
    A `matplotlib.figure.Figure`; diamonds are the reductions that SPDF prints
    for its two models.

  Raises:
    ImportError: matplotlib is not installed.

  References:
    Thangarasa et al. 2023, "SPDF", section 3.5 and appendix, table 2.

  Example:
    >>> plot_flops_reduction().axes[0].get_xlabel()
    'Parameters'
  """
  figure = style.new_figure(7, 4.4)
  ax = figure.subplots()
  ends = []
  for sparsity, color in zip(LEVELS, style.COLORS):
    sizes, times = zip(*reductions(sparsity))
    ax.axhline(1 / (1 - sparsity), color=color, linewidth=1, linestyle='--')
    ax.plot(sizes, times, color=color, marker='o', markersize=4, linewidth=1.8)
    ends.append(
        (sizes[-1], times[-1], f'{markdown.percent(sparsity)} zeros', color)
    )
    for name, printed_sparsity in computed_flops.PRETRAINED:
      if printed_sparsity == sparsity:
        share = flops_tables.printed_value(
            'SPDF, appendix, table 2', name, sparsity, 'of dense'
        )
        ax.plot(
            computed_flops.parameters_of(name)[0], 1 / share, 'D',
            color='black', markersize=6, fillstyle='none', zorder=3,
        )
  ax.set(
      xscale='log', yscale='log', xlabel='Parameters',
      ylabel='Times fewer training FLOPs',
  )
  style.polish(ax)
  ax.set_ylim(1, 11.5)
  ax.set_yticks([1, 2, 4, 10], ['1 ×', '2 ×', '4 ×', '10 ×'])
  ax.set_yticks([], minor=True)
  ax.set_xlim(ax.get_xlim())
  style.log_ticks(ax)
  style.label_ends(ax, ends, gap=0.06)
  ax.set_title(
      'Dense over sparse, 2,048 tokens; dashed: 1 / (1 − zeros)', loc='left',
      fontsize=10,
  )
  ax.annotate(
      '◇ printed by SPDF', (0.98, 0.05), xycoords='axes fraction',
      color=style.GREY, fontsize=9, ha='right',
  )
  return figure
