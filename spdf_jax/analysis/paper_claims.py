"""The claims of the papers, stated before any run that judges them."""

from spdf_jax.analysis.claims import better
from spdf_jax.analysis.claims import Claim
from spdf_jax.analysis.claims import MARGIN
from spdf_jax.analysis.claims import PRETRAINED
from spdf_jax.analysis.claims import smaller_gap
from spdf_jax.analysis.claims import TUNED

_SPDF = 'Thangarasa et al., SPDF, 2023'
_VARIABLE = 'Cerebras, Variable SPDF, 2023'
_DYNAMIC = 'Cerebras, PyTorch sparsity library, 2024'

# `Gracefully` in numbers is ours: nats that may be lost at a level.
_GRACEFUL = {50: 0.05, 75: 0.10, 90: 0.20}

_ALL = (
    Claim(
        'a', 'dense fine-tuning beats sparse fine-tuning of a sparse model',
        f'{_SPDF}, section 3.2, figure 2',
        (better('static-75+task', 'static-75+task-sparse', TUNED),),
    ),
    Claim(
        'b', 'quality falls gracefully from 0 over 50 and 75 to 90 %',
        f'{_SPDF}, section 3.3',
        (
            better('dense', 'static-50', PRETRAINED, 'at most', MARGIN),
            better('static-50', 'static-75', PRETRAINED),
            better('static-75', 'static-90', PRETRAINED),
            *(
                better(f'static-{level}', 'dense', PRETRAINED, 'at most', loss)
                for level, loss in _GRACEFUL.items()
            ),
        ),
    ),
    Claim(
        'c', 'larger models lose less at 75 %', f'{_SPDF}, section 3.3',
        tuple(
            smaller_gap(
                f'static-75{large} - dense{large} below '
                f'static-75{small} - dense{small}',
                (f'static-75{large}', f'dense{large}'),
                (f'static-75{small}', f'dense{small}'),
                PRETRAINED,
            )
            for large, small in (('', '_small'), ('_large', ''))
        ),
    ),
    Claim(
        'd', 'Variable SPDF (split) beats static 75 % at equal FLOPs, before '
        'and after fine-tuning', f'{_VARIABLE}, tables 1 and 2',
        (
            better('variable-split', 'static-75', PRETRAINED),
            better('variable-split+task', 'static-75+task', TUNED),
        ),
    ),
    Claim(
        'd-extended', 'Variable SPDF (extended) beats static 75 %, before and '
        'after fine-tuning', f'{_VARIABLE}, as its configs have it',
        (
            better('variable-extended', 'static-75', PRETRAINED),
            better('variable-extended+task', 'static-75+task', TUNED),
        ),
    ),
    Claim(
        'e', 'RigL ≥ SET ≥ static at 90 %', f'{_DYNAMIC}, table 3, for 80 %',
        (
            better('rigl-90', 'set-90', PRETRAINED, 'at most', MARGIN),
            better('set-90', 'static-90', PRETRAINED, 'at most', MARGIN),
            better('rigl-90', 'static-90', PRETRAINED),
        ),
    ),
    Claim(
        'f', 'GraNet from 50 to 80 % beats RigL at 80 %',
        f'{_DYNAMIC}, figure 8',
        (better('granet-80', 'rigl-80', PRETRAINED),),
    ),
    Claim(
        'g', 'iterative pruning with rewinding recovers the dense loss, and '
        'that of a dense model trained as long', 'Cerebras, 2022, figure 3',
        (
            better('pruned-75', 'dense', PRETRAINED, 'at most', MARGIN),
            better('pruned-75', 'longer', PRETRAINED, 'at most', MARGIN),
        ),
    ),
    Claim(
        'h', 'fine-tuning moves W_D and W_O of sparse models further',
        f'{_SPDF}, section 3.4, figure 3',
        tuple(
            better(
                'dense+task', 'static-75+task', f'distance/{module}'
            )._replace(text=f'{name} of dense+task below static-75+task')
            for module, name in (('wd', 'W_D'), ('wo', 'W_O'))
        ),
    ),
    Claim(
        'h-size', 'fine-tuning moves the weights of larger models less',
        f'{_SPDF}, section 3.4, figure 4',
        (better('dense_large+task', 'dense+task', 'distance/all'),),
    ),
    Claim(
        'i', 'the loss at 75 % is larger on the harder task and smaller with '
        'more fine-tuning data', f'{_SPDF}, section 3.3',
        tuple(
            smaller_gap(
                f'static-75+task - dense+task below static-75{other} - '
                f'dense{other}',
                ('static-75+task', 'dense+task'),
                (f'static-75{other}', f'dense{other}'),
                TUNED,
            )
            for other in ('+hard', '+tenth')
        ),
    ),
    Claim(
        'j', 'Variable SPDF matches dense after fine-tuning',
        f'{_VARIABLE}, table 3',
        (
            better(
                'variable-split+task', 'dense+task', TUNED, 'matches', MARGIN
            ),
        ),
    ),
)
CLAIMS = {claim.key: claim for claim in _ALL}
"""By letter; `-extended` and `-size` are second readings of one."""
