"""The claims of the papers, stated before the runs that judge them."""

from experiments.papers import arms
from experiments.papers import claims
from experiments.papers import scales
from experiments.papers.arms import Arm
from experiments.papers.claims import Claim
from experiments.papers.claims import Expected

_SPDF = 'Thangarasa et al., SPDF, 2023'
_VARIABLE = 'Cerebras, Variable SPDF, 2023'
_DYNAMIC = 'Cerebras, PyTorch sparsity library, 2024'
_ITERATIVE = 'Cerebras, 2022'
_OWN_QUESTION = 'our question: the best model for given FLOPs'
_OWN_QUESTION_OF_GROWTH = 'our question: moving masks against static ones'

# Non-inferiority margins in nats: of fine-tuned models of 50 and 75 % sparsity,
# of Variable SPDF against dense, of a pruned against a dense model, and against
# dense models of equal FLOPs.
_MARGINS = {scales.STATIC_50: 0.02, scales.STATIC_75: 0.05}
_MATCHES = 0.05
_RECOVERS = 0.01
_FLOPS_MARGIN = 0.02
_GROWTH_MARGIN = 0.02
_SKIP_MARGIN = 0.03


def _gaps(metric: str):
  gap = lambda size: (
      scales.sized(scales.STATIC_75, size), scales.sized(scales.DENSE, size)
  )
  return (claims.smaller_gap(gap('large'), gap('small'), metric),)


_ALL = (
    Claim(
        'a', 'dense fine-tuning beats sparse fine-tuning of a sparse model',
        f'{_SPDF}, section 3.2, figure 2',
        (claims.better(
            scales.tuned(scales.STATIC_75),
            scales.tuned(scales.STATIC_75, sparse_tuning=True), arms.TUNED
        ),),
    ),
    Claim(
        'b1', 'models pre-trained at 50 and 75 % are not inferior to dense '
        'ones after fine-tuning', f'{_SPDF}, section 3.3, table 1',
        tuple(
            claims.better(
                scales.tuned(arm), scales.tuned(scales.DENSE), arms.TUNED,
                margin
            )
            for arm, margin in _MARGINS.items()
        ),
    ),
    Claim(
        'b2', 'the loss of pre-training rises with sparsity',
        f'{_SPDF}, section 3.3',
        (claims.trend(
            'slope of the loss over sparsity above 0 (shown negated)',
            {
                scales.DENSE: 0.0, scales.STATIC_50: 0.5,
                scales.STATIC_75: 0.75, scales.STATIC_90: 0.9
            },
            arms.PRETRAINED,
        ),),
    ),
    Claim(
        'c', 'larger models lose less at 75 %, in nats',
        f'{_SPDF}, section 3.3', _gaps(arms.PRETRAINED),
    ),
    Claim(
        'd-pre', 'Variable SPDF beats static 75 % at equal FLOPs in '
        'pre-training', f'{_VARIABLE}, tables 1 and 2',
        (claims.better(scales.VARIABLE, scales.STATIC_75, arms.PRETRAINED),),
    ),
    Claim(
        'd-ft', 'Variable SPDF beats static 75 % at equal FLOPs after '
        'fine-tuning', f'{_VARIABLE}, tables 2 and 3',
        (claims.better(
            scales.tuned(scales.VARIABLE),
            scales.tuned(scales.STATIC_75), arms.TUNED
        ),),
    ),
    Claim(
        'g1', 'iterative pruning with learning-rate rewinding to 75 % recovers '
        'the dense loss', f'{_ITERATIVE}, figure 3',
        (claims.better(
            Arm('pruned', 0.75), scales.DENSE, arms.PRETRAINED, _RECOVERS
        ),),
    ),
    Claim(
        'j', 'Variable SPDF is not inferior to dense after fine-tuning',
        f'{_VARIABLE}, table 3',
        (claims.better(
            scales.tuned(scales.VARIABLE),
            scales.tuned(scales.DENSE), arms.TUNED, _MATCHES
        ),),
    ),
    Claim(
        'c-ppl', 'larger models lose less at 75 %, in perplexity',
        f'{_SPDF}, section 3.3', _gaps('validation/perplexity'),
        claims.SECONDARY,
    ),
    Claim(
        'e', 'RigL and SET beat a static mask at 90 %',
        f'{_DYNAMIC}, table 3, for 80 %',
        tuple(
            claims.better(Arm(method, 0.9), scales.STATIC_90, arms.PRETRAINED)
            for method in ('rigl', 'set')
        ),
        claims.SECONDARY,
    ),
    Claim(
        'g2', 'the pruned model recovers the loss of a dense one trained as '
        'long', 'our control of g1',
        (claims.better(
            Arm('pruned', 0.75), Arm('longer'), arms.PRETRAINED, _RECOVERS
        ),),
        claims.SECONDARY,
    ),
    Claim(
        'h', 'fine-tuning moves W_D and W_O of sparse models further',
        f'{_SPDF}, section 3.4, figure 3',
        tuple(
            claims.better(
                scales.tuned(
                    scales.DENSE, rate_of=scales.tuned(scales.STATIC_75)
                ),
                    scales.tuned(scales.STATIC_75),
                f'distance/{module}',
            )._replace(text=f'{name} of dense+task below static-75+task')
            for module, name in (('wd', 'W_D'), ('wo', 'W_O'))
        ),
        claims.SECONDARY,
    ),
    Claim(
        'i', 'the loss at 75 % is larger on the harder task',
        f'{_SPDF}, section 3.3',
        (claims.smaller_gap(
            (scales.tuned(scales.STATIC_75), scales.tuned(scales.DENSE)),
            (
                scales.tuned(scales.STATIC_75, 'hard'),
                scales.tuned(scales.DENSE, 'hard')
            ), arms.TUNED,
        ),),
        claims.SECONDARY,
    ),
)

_OLD = 'Llamas of width 64 at context 256'
_PILOT = 'a pilot of one seed'


def _pays(width: int, sparse: Arm, small: Arm) -> list[Claim]:
  """Returns the claims about a width and dense models of equal FLOPs."""
  dense = scales.at_flops_of(sparse)
  return [
      Claim(
          f'flops-{width}', 'static 75 % beats a dense model of its size at '
          f'equal FLOPs, width {width}', _OWN_QUESTION,
          (claims.better(sparse, dense, arms.PRETRAINED),), 'pays',
          Expected(-0.08, 0.0169, f'{_PILOT}; {_OLD}'),
      ),
      Claim(
          f'small-{width}', 'static 75 % is not inferior to a smaller dense '
          f'model at equal FLOPs, width {width}', _OWN_QUESTION,
          (claims.better(sparse, small, arms.PRETRAINED, _FLOPS_MARGIN),),
          'pays', Expected(0.0, 0.0134, f'{_PILOT}; {_OLD}'),
      ),
  ]


_VARIABLE_WAS = Expected(0.0514, 0.0101, _OLD)


def _variable(
    key: str, text: str, arm: Arm, static: Arm,
    expected: Expected = _VARIABLE_WAS,
) -> Claim:
  return Claim(
      key, f'{text} beats static 75 % at equal FLOPs', _VARIABLE,
      (claims.better(arm, static, arms.PRETRAINED),), 'Variable', expected,
  )


_W96 = scales.sized(scales.STATIC_75, 'w96')
_CONTEXT_64 = (
    *_pays(64, scales.STATIC_75, scales.SMALL),
    *_pays(96, _W96, scales.sized(scales.DENSE, 'small-w96')),
    _variable(
        'variable-64', 'Variable SPDF, width 64,', scales.VARIABLE,
        scales.STATIC_75
    ),
    _variable(
        'early-64', 'Variable SPDF that is dense from the half on, width 64,',
        scales.EARLY_DENSE, scales.STATIC_75,
        Expected(-0.02, 0.0101, f'no pilot; deviation of {_OLD}')
    ),
    _variable(
        'variable-96',
        'Variable SPDF that is dense from the half on, width 96,',
        scales.EARLY_DENSE_96, _W96,
        Expected(0.0514, 0.0101, f'of Variable, which it replaces; {_OLD}')
    ),
    Claim(
        'size', 'larger models lose less at 75 %: width 96 less than 64',
        f'{_SPDF}, section 3.3',
        (claims.smaller_gap(
            (_W96, scales.sized(scales.DENSE, 'w96')),
            (scales.STATIC_75, scales.DENSE), arms.PRETRAINED
        ),),
        'size', Expected(-0.02, 0.013, _OLD),
    ),
    Claim(
        'gradual', 'gradual pruning to 75 % is not inferior to a smaller dense '
        'model of equal FLOPs', 'Frantar et al., 2023',
        (claims.better(
            scales.GRADUAL, scales.SMALL_GRADUAL, arms.PRETRAINED, _FLOPS_MARGIN
        ),),
        'gradual', Expected(0.006, 0.0134, f'{_PILOT}; {_OLD}'),
    ),
)
# As if paired fine-tunings were independent: sqrt(2) times the deviation of
# dense models over the tuning seeds.
_SURVIVES_BY = Expected(0.0, 0.0172, 'tuning seeds of claims-context-64')


def _survives(
    key: str, text: str, arm: Arm, other: Arm, family: str, source: str
) -> Claim:
  first, second = (scales.tuned(a, scales.CHOSEN) for a in (arm, other))
  return Claim(
      key, f'{text} after fine-tuning', source,
      (claims.better(first, second, arms.TUNED, _FLOPS_MARGIN),), family,
      _SURVIVES_BY,
  )


_FINE_TUNING = (
    _survives(
        'tuned-75', 'static 75 % is not inferior to dense on all tokens',
        scales.STATIC_75, scales.DENSE, 'survives',
        f'{_SPDF}, section 3.3, table 1'
    ),
    _survives(
        'tuned-variable', 'Variable SPDF is not inferior to dense on all '
        'tokens', scales.VARIABLE, scales.DENSE, 'survives',
        f'{_VARIABLE}, table 3'
    ),
    _survives(
        'tuned-small', 'static 75 % is not inferior to a smaller dense model '
        'of equal FLOPs', scales.STATIC_75, scales.SMALL, 'pays', _OWN_QUESTION
    ),
)
_LLAMA = 'Llamas of width 96 at context 256, three seeds'


def _growth(percent: int) -> list[Claim]:
  """Returns the claims about growth at a sparsity."""
  arm = lambda method: scales.grown(method, percent / 100)
  of = lambda key, text, family, first, second, margin, expected: Claim(
      f'{key}-{percent}', f'{text}, {percent} %', _OWN_QUESTION_OF_GROWTH,
      (claims.better(arm(first), arm(second), arms.PRETRAINED, margin),),
      family, expected,
  )
  return [
      of(
          'grow', 'balanced growth has a lower loss than RigL', 'growth',
          'rigl-balanced', 'rigl', 0.0,
          Expected(-0.045, 0.0105, f'two pilots; {_LLAMA}'),
      ),
      of(
          'level', 'RigL with balanced growth is not inferior to a static mask',
          'growth', 'rigl-balanced', 'static', _GROWTH_MARGIN,
          Expected(-0.002, 0.0105, f'two pilots; {_LLAMA}'),
      ),
      of(
          'granet', 'GraNet with balanced growth has a lower loss than GraNet',
          'GraNet', 'granet-balanced', 'granet', 0.0,
          Expected(-0.045, 0.0258, f'no pilot; {_LLAMA}'),
      ),
      of(
          'set', 'SET is not inferior to a static mask', 'SET', 'set', 'static',
          _GROWTH_MARGIN, Expected(0.0002, 0.0051, _LLAMA),
      ),
  ]


_SKIP = Claim(
    'skip-80', 'RigL is not inferior by 0.03 to RigL that skips the gradient '
    'steps of mask updates, 80 %', 'Evci et al., RigL, 2020',
    (claims.better(
        scales.grown('rigl', 0.8), scales.grown('rigl-skipped', 0.8),
        arms.PRETRAINED, _SKIP_MARGIN
    ),),
    'skipped', Expected(0.008, 0.0105, f'a pilot of one seed; {_LLAMA}'),
)
_GROWTH = (*_growth(80), *_growth(90), _SKIP)
CLAIMS = {
    claim.key: claim
    for claim in (*_ALL, *_CONTEXT_64, *_FINE_TUNING, *_GROWTH)
}
"""Claims by key."""
