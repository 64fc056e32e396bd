"""The claims of the papers, stated before the runs that judge them."""

from collections.abc import Callable
import itertools

from experiments.papers import arms
from experiments.papers import claims
from experiments.papers import scales
from experiments.papers.arms import Arm
from experiments.papers.claims import Claim
from experiments.papers.claims import Comparison
from experiments.papers.claims import Term

_SPDF = 'Thangarasa et al., SPDF, 2023'
_VARIABLE = 'Cerebras, Variable SPDF, 2023'
_DYNAMIC = 'Cerebras, PyTorch sparsity library, 2024'
_ITERATIVE = 'Cerebras, 2022'
_OWN_QUESTION = 'our question: the best model for given FLOPs'

# Non-inferiority margins in nats: of fine-tuned models of 50 and 75 % sparsity,
# of Variable SPDF against dense, of a pruned against a dense model, and of
# blocks of zeros against single ones.
_MARGINS = {scales.STATIC_50: 0.02, scales.STATIC_75: 0.05}
_MATCHES = 0.05
_RECOVERS = 0.01
_BLOCKS_COST = 0.02


def _gaps(metric: str):
  gap = lambda size: (
      scales.sized(scales.STATIC_75, size), scales.sized(scales.DENSE, size)
  )
  return (claims.smaller_gap(gap('large'), gap('small'), metric),)


def _gap_on(task: str) -> tuple[Arm, Arm]:
  return (
      scales.on_share(scales.STATIC_75, task),
      scales.on_share(scales.DENSE, task)
  )


def _of_blocks(key: str, structures: tuple[str, ...]) -> list[Claim]:
  """Returns the claims about blocks, before and after fine-tuning."""
  return [
      Claim(
          f'{key}{suffix}', text, 'our question',
          tuple(
              claims.better(
                  at(structure), anywhere, anywhere.metric, _BLOCKS_COST
              )
              for structure in structures
          ),
          claims.SECONDARY,
      )
      for suffix, text, at, anywhere in (
          (
              '', 'zeros in blocks cost a static mask nothing',
              scales.structured, scales.STATIC_75
          ),
          (
              '-ft', 'nor do they after dense fine-tuning',
              scales.tuned_structured, scales.tuned(scales.STATIC_75)
          ),
      )
  ]


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
        'e-80', 'RigL and SET beat a static mask at 80 %',
        f'{_DYNAMIC}, table 3',
        tuple(
            claims.better(
                scales.at_80(method), scales.at_80('static'), arms.PRETRAINED
            )
            for method in ('rigl', 'set')
        ),
        claims.SECONDARY,
    ),
    Claim(
        'f', 'GraNet from 50 to 80 % beats RigL at 80 %',
        f'{_DYNAMIC}, figure 8',
        (claims.better(
            scales.at_80('granet'), scales.at_80('rigl'), arms.PRETRAINED
        ),),
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
        'h-size', 'fine-tuning moves the weights of larger models less',
        f'{_SPDF}, section 3.4, figure 4',
        (claims.better(
            scales.tuned(scales.sized(scales.DENSE, 'large')),
            scales.tuned(scales.DENSE), 'distance/all'
        ),),
        claims.SECONDARY,
    ),
    Claim(
        'set-size', 'the loss at 75 % is smaller after fine-tuning on more '
        'pairs', f'{_SPDF}, section 2.1, hypothesis 2',
        tuple(
            claims.smaller_gap(
                _gap_on(more), _gap_on(fewer), arms.TUNED
            )._replace(text=f'static-75 - dense on {more} below on {fewer}')
            for more, fewer in itertools.pairwise(scales.SHARES)
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
    Claim(
        'transfer', 'in sparse muP the rate of a small dense model serves a '
        'larger sparse one as well as a rate of its own',
        'Dey et al., sparse muP, 2024',
        tuple(
            claims.better(
                scales.transferred(size),
                scales.sized(scales.STATIC_75, size), arms.PRETRAINED, _RECOVERS
            )
            for size in ('w96', 'w128')
        ),
        claims.SECONDARY,
    ),
    Claim(
        'revival', 'a dense stage ends lower re-warmed, with ages of weights, '
        'and with a warm-up of revived weights', 'our question',
        tuple(
            claims.better(
                scales.continued(stage), scales.continued('continue'),
                arms.PRETRAINED,
            )
            for stage in scales.STAGES
        ),
        claims.SECONDARY,
    ),
    *_of_blocks('blocks', scales.BALANCED),
    Claim(
        'balance', 'blocks of 32 are better with equally many in each column',
        'our question',
        (claims.better(
            scales.structured('blocks-32'), scales.UNBALANCED, arms.PRETRAINED
        ),),
        claims.SECONDARY,
    ),
    *_of_blocks('blocks-32', ('blocks-32',)),
)


def _on_e2e(arm: Arm) -> Arm:
  return scales.tuned(arm, 'e2e')


def _of_flops(
    suffix: str, family: str, metric: str, where: str,
    at: Callable[[Arm], Arm] = lambda arm: arm,
) -> list[Claim]:
  """Returns the four comparisons of sparse and dense arms at equal FLOPs."""
  return [
      Claim(
          f'{key}{other}{suffix}',
          f'{name} beats {text} at equal FLOPs, {where}', _OWN_QUESTION,
          (claims.better(at(arm), at(dense), metric),), family,
      )
      for key, name, arm in (
          ('', 'static 75 %', scales.STATIC_75),
          ('variable-', 'Variable', scales.VARIABLE)
      )
      for other, text, dense in (
          (
              'flops', 'a dense model of its size',
              scales.at_flops_of(scales.STATIC_75)
          ),
          (
              'small', 'a smaller dense model',
              scales.sized(scales.DENSE, 'small')
          ),
      )
  ]


def _narrow(width: int) -> list[Claim]:
  sparse = scales.sized(scales.STATIC_75, f'w{width}')
  return [
      Claim(
          f'{key}-{width}', f'static 75 % beats {text} at equal FLOPs, '
          f'width {width}', _OWN_QUESTION,
          (claims.better(sparse, dense, arms.PRETRAINED),), 'E2',
      )
      for key, text, dense in (
          ('flops', 'a dense model of its size', scales.at_flops_of(sparse)),
          (
              'small', 'a smaller dense model',
              scales.sized(scales.DENSE, f'small-w{width}')
          ),
      )
  ]


def _bleu(key: str, other: str, dense: Arm) -> Claim:
  terms = lambda at: (
      Term(1, at(dense), arms.SCORED_BLEU),
      Term(-1, at(scales.STATIC_75), arms.SCORED_BLEU)
  )
  return Claim(
      key, f'static 75 % has a higher BLEU than {other} at equal FLOPs',
      _OWN_QUESTION,
      tuple(
          Comparison(f'{dense.name} less static-75 on {task}', terms(at))
          for task, at in (('E2E', _on_e2e), ('WebNLG', scales.on_webnlg))
      ),
      'E1, WebNLG and BLEU',
  )


_rotary = lambda arm: scales.sized(arm, 'rotary-w96')
_OF_FLOPS = (
    *_narrow(64), *_narrow(96),
    *_of_flops('', 'E1', arms.PRETRAINED, 'in pre-training'),
    *_of_flops('-e2e', 'E1', arms.SCORED, 'after fine-tuning on E2E', _on_e2e),
    *(
        Claim(
            key, f'{name} is not inferior to dense on as many tokens, after '
            'fine-tuning on E2E', _SPDF,
            (claims.better(
                _on_e2e(arm), _on_e2e(scales.DENSE), arms.SCORED, 0.02
            ),),
            'E1',
        )
        for key, name, arm in (
            ('repaid', 'static 75 %', scales.STATIC_75),
            ('variable-repaid', 'Variable', scales.VARIABLE),
        )
    ),
    *_of_flops(
        '-webnlg', 'E1, WebNLG and BLEU', arms.SCORED,
        'after fine-tuning on WebNLG', scales.on_webnlg,
    ),
    _bleu(
        'flops-bleu', 'a dense model of its size',
        scales.at_flops_of(scales.STATIC_75)
    ),
    _bleu(
        'small-bleu', 'a smaller dense model',
        scales.sized(scales.DENSE, 'small')
    ),
    Claim(
        'variable', 'Variable SPDF beats static 75 % at equal FLOPs in '
        'pre-training', f'{_VARIABLE}, tables 1 and 2',
        (claims.better(scales.VARIABLE, scales.STATIC_75, arms.PRETRAINED),),
        'E3',
    ),
    Claim(
        'variable-e2e', 'Variable SPDF beats static 75 % at equal FLOPs after '
        'fine-tuning on E2E', f'{_VARIABLE}, tables 2 and 3',
        (claims.better(
            _on_e2e(scales.VARIABLE), _on_e2e(scales.STATIC_75), arms.SCORED
        ),),
        'E3',
    ),
    Claim(
        'rotary', 'with rotary positions the loss of pre-training is lower '
        'without zeros', _OWN_QUESTION,
        (claims.better(
            _rotary(scales.DENSE), _rotary(scales.STATIC_75), arms.PRETRAINED
        ),), 'E6',
    ),
    Claim(
        'variable-rotary', 'with rotary positions Variable SPDF beats static '
        '75 % at equal FLOPs', _OWN_QUESTION,
        (claims.better(
            _rotary(scales.VARIABLE), _rotary(scales.STATIC_75), arms.PRETRAINED
        ),), 'E6',
    ),
)
CLAIMS = {claim.key: claim for claim in (*_ALL, *_OF_FLOPS)}
"""Claims by key."""
