"""The claims of the papers, stated before the runs that judge them."""

from collections.abc import Callable

from experiments.papers.arms import Arm
from experiments.papers.arms import PRETRAINED
from experiments.papers.arms import SCORED
from experiments.papers.arms import SCORED_BLEU
from experiments.papers.arms import TUNED
from experiments.papers.claims import better
from experiments.papers.claims import Claim
from experiments.papers.claims import Comparison
from experiments.papers.claims import SECONDARY
from experiments.papers.claims import smaller_gap
from experiments.papers.claims import Term
from experiments.papers.claims import trend
from experiments.papers.scales import at_flops_of
from experiments.papers.scales import DENSE
from experiments.papers.scales import on_webnlg
from experiments.papers.scales import sized
from experiments.papers.scales import STATIC_50
from experiments.papers.scales import STATIC_75
from experiments.papers.scales import STATIC_90
from experiments.papers.scales import tuned
from experiments.papers.scales import VARIABLE

_SPDF = 'Thangarasa et al., SPDF, 2023'
_VARIABLE = 'Cerebras, Variable SPDF, 2023'
_DYNAMIC = 'Cerebras, PyTorch sparsity library, 2024'
_ITERATIVE = 'Cerebras, 2022'
_OWN_QUESTION = 'our question: the best model for given FLOPs'

# Non-inferiority margins in nats: of fine-tuned models of 50 and 75 % sparsity,
# of Variable SPDF against dense, and of a pruned against a dense model.
_MARGINS = {STATIC_50: 0.02, STATIC_75: 0.05}
_MATCHES = 0.05
_RECOVERS = 0.01


def _gaps(metric: str):
  gap = lambda size: (sized(STATIC_75, size), sized(DENSE, size))
  return (smaller_gap(gap('large'), gap('small'), metric),)


_ALL = (
    Claim(
        'a', 'dense fine-tuning beats sparse fine-tuning of a sparse model',
        f'{_SPDF}, section 3.2, figure 2',
        (better(
            tuned(STATIC_75), tuned(STATIC_75, sparse_tuning=True), TUNED
        ),),
    ),
    Claim(
        'b1', 'models pre-trained at 50 and 75 % are not inferior to dense '
        'ones after fine-tuning', f'{_SPDF}, section 3.3, table 1',
        tuple(
            better(tuned(arm), tuned(DENSE), TUNED, margin)
            for arm, margin in _MARGINS.items()
        ),
    ),
    Claim(
        'b2', 'the loss of pre-training rises with sparsity',
        f'{_SPDF}, section 3.3',
        (trend(
            'slope of the loss over sparsity above 0 (shown negated)',
            {DENSE: 0.0, STATIC_50: 0.5, STATIC_75: 0.75, STATIC_90: 0.9},
            PRETRAINED,
        ),),
    ),
    Claim(
        'c', 'larger models lose less at 75 %, in nats',
        f'{_SPDF}, section 3.3', _gaps(PRETRAINED),
    ),
    Claim(
        'd-pre', 'Variable SPDF beats static 75 % at equal FLOPs in '
        'pre-training', f'{_VARIABLE}, tables 1 and 2',
        (better(VARIABLE, STATIC_75, PRETRAINED),),
    ),
    Claim(
        'd-ft', 'Variable SPDF beats static 75 % at equal FLOPs after '
        'fine-tuning', f'{_VARIABLE}, tables 2 and 3',
        (better(tuned(VARIABLE), tuned(STATIC_75), TUNED),),
    ),
    Claim(
        'g1', 'iterative pruning with learning-rate rewinding to 75 % recovers '
        'the dense loss', f'{_ITERATIVE}, figure 3',
        (better(Arm('pruned', 0.75), DENSE, PRETRAINED, _RECOVERS),),
    ),
    Claim(
        'j', 'Variable SPDF is not inferior to dense after fine-tuning',
        f'{_VARIABLE}, table 3',
        (better(tuned(VARIABLE), tuned(DENSE), TUNED, _MATCHES),),
    ),
    Claim(
        'c-ppl', 'larger models lose less at 75 %, in perplexity',
        f'{_SPDF}, section 3.3', _gaps('validation/perplexity'), SECONDARY,
    ),
    Claim(
        'e', 'RigL and SET beat a static mask at 90 %',
        f'{_DYNAMIC}, table 3, for 80 %',
        tuple(
            better(Arm(method, 0.9), STATIC_90, PRETRAINED)
            for method in ('rigl', 'set')
        ),
        SECONDARY,
    ),
    Claim(
        'f', 'GraNet from 50 to 80 % beats RigL at 80 %',
        f'{_DYNAMIC}, figure 8',
        (better(Arm('granet', 0.8), Arm('rigl', 0.8), PRETRAINED),), SECONDARY,
    ),
    Claim(
        'g2', 'the pruned model recovers the loss of a dense one trained as '
        'long', 'our control of g1',
        (better(
            Arm('pruned', 0.75), Arm('longer'), PRETRAINED, _RECOVERS
        ),),
        SECONDARY,
    ),
    Claim(
        'h', 'fine-tuning moves W_D and W_O of sparse models further',
        f'{_SPDF}, section 3.4, figure 3',
        tuple(
            better(
                tuned(DENSE, rate_of=tuned(STATIC_75)), tuned(STATIC_75),
                f'distance/{module}',
            )._replace(text=f'{name} of dense+task below static-75+task')
            for module, name in (('wd', 'W_D'), ('wo', 'W_O'))
        ),
        SECONDARY,
    ),
    Claim(
        'h-size', 'fine-tuning moves the weights of larger models less',
        f'{_SPDF}, section 3.4, figure 4',
        (better(
            tuned(sized(DENSE, 'large')), tuned(DENSE), 'distance/all'
        ),),
        SECONDARY,
    ),
    Claim(
        'i', 'the loss at 75 % is larger on the harder task',
        f'{_SPDF}, section 3.3',
        (smaller_gap(
            (tuned(STATIC_75), tuned(DENSE)),
            (tuned(STATIC_75, 'hard'), tuned(DENSE, 'hard')), TUNED,
        ),),
        SECONDARY,
    ),
)


def _on_e2e(arm: Arm) -> Arm:
  return tuned(arm, 'e2e')


def _of_flops(
    suffix: str, family: str, metric: str, where: str,
    at: Callable[[Arm], Arm] = lambda arm: arm,
) -> list[Claim]:
  """Returns the four comparisons of sparse and dense arms at equal FLOPs."""
  return [
      Claim(
          f'{key}{other}{suffix}',
          f'{name} beats {text} at equal FLOPs, {where}', _OWN_QUESTION,
          (better(at(arm), at(dense), metric),), family,
      )
      for key, name, arm in (
          ('', 'static 75 %', STATIC_75), ('variable-', 'Variable', VARIABLE)
      )
      for other, text, dense in (
          ('flops', 'a dense model of its size', at_flops_of(STATIC_75)),
          ('small', 'a smaller dense model', sized(DENSE, 'small')),
      )
  ]


def _narrow(width: int) -> list[Claim]:
  sparse = sized(STATIC_75, f'w{width}')
  return [
      Claim(
          f'{key}-{width}', f'static 75 % beats {text} at equal FLOPs, '
          f'width {width}', _OWN_QUESTION,
          (better(sparse, dense, PRETRAINED),), 'E2',
      )
      for key, text, dense in (
          ('flops', 'a dense model of its size', at_flops_of(sparse)),
          ('small', 'a smaller dense model', sized(DENSE, f'small-w{width}')),
      )
  ]


def _bleu(key: str, other: str, dense: Arm) -> Claim:
  terms = lambda at: (
      Term(1, at(dense), SCORED_BLEU), Term(-1, at(STATIC_75), SCORED_BLEU)
  )
  return Claim(
      key, f'static 75 % has a higher BLEU than {other} at equal FLOPs',
      _OWN_QUESTION,
      tuple(
          Comparison(f'{dense.name} less static-75 on {task}', terms(at))
          for task, at in (('E2E', _on_e2e), ('WebNLG', on_webnlg))
      ),
      'E1, WebNLG and BLEU',
  )


_rotary = lambda arm: sized(arm, 'rotary-w96')
_OF_FLOPS = (
    *_narrow(64), *_narrow(96),
    *_of_flops('', 'E1', PRETRAINED, 'in pre-training'),
    *_of_flops('-e2e', 'E1', SCORED, 'after fine-tuning on E2E', _on_e2e),
    *(
        Claim(
            key, f'{name} is not inferior to dense on as many tokens, after '
            'fine-tuning on E2E', _SPDF,
            (better(_on_e2e(arm), _on_e2e(DENSE), SCORED, 0.02),),
            'E1',
        )
        for key, name, arm in (
            ('repaid', 'static 75 %', STATIC_75),
            ('variable-repaid', 'Variable', VARIABLE),
        )
    ),
    *_of_flops(
        '-webnlg', 'E1, WebNLG and BLEU', SCORED,
        'after fine-tuning on WebNLG', on_webnlg,
    ),
    _bleu('flops-bleu', 'a dense model of its size', at_flops_of(STATIC_75)),
    _bleu('small-bleu', 'a smaller dense model', sized(DENSE, 'small')),
    Claim(
        'variable', 'Variable SPDF beats static 75 % at equal FLOPs in '
        'pre-training', f'{_VARIABLE}, tables 1 and 2',
        (better(VARIABLE, STATIC_75, PRETRAINED),), 'E3',
    ),
    Claim(
        'variable-e2e', 'Variable SPDF beats static 75 % at equal FLOPs after '
        'fine-tuning on E2E', f'{_VARIABLE}, tables 2 and 3',
        (better(_on_e2e(VARIABLE), _on_e2e(STATIC_75), SCORED),),
        'E3',
    ),
    Claim(
        'rotary', 'with rotary positions the loss of pre-training is lower '
        'without zeros', _OWN_QUESTION,
        (better(_rotary(DENSE), _rotary(STATIC_75), PRETRAINED),), 'E6',
    ),
    Claim(
        'variable-rotary', 'with rotary positions Variable SPDF beats static '
        '75 % at equal FLOPs', _OWN_QUESTION,
        (better(_rotary(VARIABLE), _rotary(STATIC_75), PRETRAINED),), 'E6',
    ),
)
CLAIMS = {claim.key: claim for claim in (*_ALL, *_OF_FLOPS)}
"""Claims by key."""
