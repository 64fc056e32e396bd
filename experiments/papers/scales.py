"""Scales of experiments.reproduce: sizes of models, data and runs, as data."""

import dataclasses
import math

from experiments.papers.arms import Arm
from experiments.papers.scale import Block
from experiments.papers.scale import Scale
from experiments.papers.scale import Size

DENSE = Arm('dense')
STATIC_50, STATIC_75, STATIC_90 = (
    Arm('static', sparsity) for sparsity in (0.5, 0.75, 0.9)
)
CONTROL = Arm('static', 0.99)
VARIABLE = Arm('variable', 0.9)
_RATES = (4e-3, 8e-3, 1.6e-2)


def tuned(arm: Arm, task: str = 'task', **changes) -> Arm:
  """Returns the fine-tuning of an arm on a task."""
  return dataclasses.replace(arm, task=task, **changes)


def sized(arm: Arm, size: str) -> Arm:
  """Returns an arm at another size."""
  return dataclasses.replace(arm, size=size)


FAIR = Scale(
    claims=(
        'a', 'b1', 'b2', 'c', 'd-pre', 'd-ft', 'g1', 'j',
        'c-ppl', 'e', 'g2', 'h', 'i',
    ),
    blocks=(
        Block((DENSE, STATIC_75, STATIC_90, VARIABLE), 8),
        Block((CONTROL,), 3),
        Block((
            tuned(DENSE), tuned(STATIC_75),
            tuned(STATIC_75, sparse_tuning=True), tuned(VARIABLE),
        ), 8),
        Block((STATIC_50, tuned(STATIC_50)), 8),
        Block((sized(DENSE, 'small'), sized(STATIC_75, 'small')), 8),
        Block((sized(CONTROL, 'small'),), 3),
        Block((sized(DENSE, 'large'), sized(STATIC_75, 'large')), 5),
        Block((sized(CONTROL, 'large'),), 3),
        Block((Arm('pruned', 0.75), Arm('longer')), 8),
        Block((Arm('set', 0.9), Arm('rigl', 0.9)), 6),
        Block((tuned(DENSE, rate_of=tuned(STATIC_75)),), 6),
        Block((tuned(DENSE, 'hard'), tuned(STATIC_75, 'hard')), 6),
    ),
    sizes={
        '': Size(64, _RATES),
        'small': Size(32, _RATES),
        'large': Size(96, (2e-3, 4e-3, 8e-3)),
    },
    layers=4,
    length=256,
    batch_size=4,
    micro_batches=2,
    tokens_per_parameter=20,
    stages=('continue', 0.3, 1.0),
    rounds=5,
    round_share=0.25,
    tune_batch=8,
    tune_steps=1200,
    tune_rates=(3e-3, 6e-3, 1.2e-2),
    corpus='books',
    tokenizer='bytes',
    tasks={'task': ('e2e', 'e2e', 4), 'hard': ('webnlg', 'webnlg17', 2)},
    batches=48,
)


def at_flops_of(arm: Arm) -> Arm:
  """Returns the dense arm that trains on the FLOPs of another arm."""
  return Arm('dense', size=arm.size, flops_of=arm)


def on_webnlg(arm: Arm) -> Arm:
  """Returns the fine-tuning on WebNLG, at the rate of the one on E2E."""
  return tuned(arm, 'webnlg', rate_of=tuned(arm, 'e2e'))


def rotary_control(arm: Arm, size: str) -> Arm:
  """Returns a dense arm with rotary positions, at the rate of another arm."""
  return Arm('dense', size=size, rate_of=arm)


def _controls(size: str) -> tuple[Arm, ...]:
  """Returns the arms of the gates of a size that has no fine-tuning."""
  static = sized(STATIC_75, size)
  dense = at_flops_of(static)
  return (
      dataclasses.replace(sized(DENSE, size), rate_of=dense),
      dataclasses.replace(sized(CONTROL, size), rate_of=static),
      rotary_control(dense, f'rotary-{size}'),
  )


_W64, _W96 = (sized(STATIC_75, size) for size in ('w64', 'w96'))
_SMALL, _SMALL_64, _SMALL_96 = (
    Arm('dense', size=size) for size in ('small', 'small-w64', 'small-w96')
)
_E1 = DENSE, at_flops_of(STATIC_75), _SMALL, STATIC_75, VARIABLE
_E1_TUNED = tuple(tuned(arm, 'e2e') for arm in _E1)

_E1_CLAIMS = (
    'flops', 'small', 'variable-flops', 'variable-small', 'flops-e2e',
    'small-e2e', 'variable-flops-e2e', 'variable-small-e2e', 'repaid',
    'variable-repaid',
    'flops-webnlg', 'small-webnlg', 'variable-flops-webnlg',
    'variable-small-webnlg', 'flops-bleu', 'small-bleu',
)
_E3_CLAIMS = 'variable', 'variable-e2e'
_E1_BLOCKS = (
    Block(_E1, 5),
    Block((CONTROL,), 2),
    Block(_E1_TUNED, 5),
    Block((
        tuned(CONTROL, 'e2e', rate_of=tuned(STATIC_75, 'e2e')),
    ), 2),
    Block(tuple(map(on_webnlg, _E1)), 5),
)

FLOPS = dataclasses.replace(
    FAIR,
    claims=(
        'flops-64', 'small-64', 'flops-96', 'small-96', *_E1_CLAIMS,
        *_E3_CLAIMS, 'rotary', 'variable-rotary',
    ),
    blocks=(
        # E2, and the arms of its gates
        Block((at_flops_of(_W64), _SMALL_64, _W64), 8),
        Block(_controls('w64'), 2),
        Block((at_flops_of(_W96), _SMALL_96, _W96), 5),
        Block(_controls('w96'), 2),
        *_E1_BLOCKS,
        # E3
        Block((
            STATIC_75, VARIABLE, tuned(STATIC_75, 'e2e'),
            tuned(VARIABLE, 'e2e'),
        ), 12),
        # E6
        Block(tuple(
            sized(arm, 'rotary-w96') for arm in (DENSE, STATIC_75, VARIABLE)
        ), 5),
    ),
    sizes={
        '': Size(128, (4e-3, 8e-3, 1.6e-2), batch_size=8),
        'small': Size(
            80, (4e-3, 8e-3, 1.6e-2), batch_size=8, tokens_of=''
        ),
        'w64': Size(64, (8e-3, 1.6e-2, 3.2e-2)),
        'small-w64': Size(
            44, (8e-3, 1.6e-2, 3.2e-2), n_heads=2, d_ff=184, tokens_of='w64'
        ),
        'w96': Size(96, (4e-3, 8e-3, 1.6e-2)),
        'small-w96': Size(
            64, (8e-3, 1.6e-2, 3.2e-2), d_ff=244, tokens_of='w96'
        ),
        'rotary-w64': Size(
            64, (8e-3, 1.6e-2, 3.2e-2), rotary=True, tokens_of='w64'
        ),
        'rotary-w96': Size(
            96, (4e-3, 8e-3, 1.6e-2), rotary=True, tokens_of='w96'
        ),
    },
    stages=(0.3,),
    tune_steps=2400,
    tasks={'e2e': ('e2e', 'e2e', 1), 'webnlg': ('webnlg', 'webnlg17', 1)},
    protocol='PROTOCOL-2.md',
    more_gates=('G5', 'G6'),
    tuning_seeds=(1, 2, 3),
    spread=0.03,
    repeat_every=3,
    scored=True,
)

FLOPS_LLAMA = dataclasses.replace(
    FLOPS,
    claims=(*_E1_CLAIMS, *_E3_CLAIMS),
    blocks=_E1_BLOCKS,
    sizes={
        '': Size(64, (4e-3, 8e-3, 1.6e-2), n_heads=2, rotary=True),
        'small': Size(
            44, (4e-3, 8e-3, 1.6e-2), n_heads=2, d_ff=120, rotary=True,
            tokens_of=''
        ),
    },
    tune_steps=1200,
    batches=24,
    protocol='PROTOCOL-7.md',
    spread=math.inf,
)

SHARES = {'task': 1, 'quarter': 4, 'sixteenth': 16}
"""Tasks of the scale llama: E2E, every fourth pair, and every sixteenth."""


def on_share(arm: Arm, task: str) -> Arm:
  """Returns the fine-tuning on a task of `SHARES`, at the rate of all pairs."""
  return tuned(arm, task, rate_of=None if task == 'task' else tuned(arm))


def at_80(method: str) -> Arm:
  """Returns an arm of 80 % sparsity at the large size."""
  return Arm(method, 0.8, size='large')


LLAMA = dataclasses.replace(
    FAIR,
    claims=('f', 'e-80', 'set-size', 'h-size'),
    blocks=(
        Block(tuple(map(at_80, ('static', 'set', 'rigl', 'granet'))), 3),
        Block((
            DENSE, STATIC_75, dataclasses.replace(CONTROL, rate_of=STATIC_75),
        ), 3),
        Block(tuple(
            on_share(arm, task) for task in SHARES for arm in (DENSE, STATIC_75)
        ), 3),
        Block((sized(DENSE, 'large'), tuned(sized(DENSE, 'large'))), 3),
    ),
    sizes={
        '': Size(64, (8e-3, 1.6e-2, 3.2e-2), rotary=True),
        'large': Size(
            96, (8e-3, 1.6e-2, 3.2e-2), rotary=True, tokens_of=''
        ),
    },
    batch_size=2,
    micro_batches=1,
    tokens_per_parameter=5,
    tune_steps=450,
    tasks={name: ('e2e', 'e2e', every) for name, every in SHARES.items()},
    demonstration=True,
    protocol='PROTOCOL-3.md',
    batches=24,
    tuning_seeds=(1, 2, 3),
)

MUP = Arm('dense', mup=True)
STAGES = (0.3, 'age', 'age-warmup')
"""Remedies for the spike of loss where a sparse model becomes dense."""


def continued(stage: str | float) -> Arm:
  """Returns Variable at width 96, with a dense stage of its own."""
  arm = sized(VARIABLE, 'w96')
  rate_of = sized(STATIC_75, 'w96')
  return dataclasses.replace(arm, stage=stage, rate_of=rate_of)


def transferred(size: str) -> Arm:
  """Returns static 75 % in sparse muP, at the rate of the small dense model."""
  return Arm('static', 0.75, size=size, mup=True, rate_of=MUP)


DENSITY = dataclasses.replace(
    LLAMA,
    claims=('transfer', 'revival'),
    blocks=(
        Block((
            Arm('init'), MUP, Arm('static', 0.99, mup=True, rate_of=MUP),
            sized(STATIC_75, 'w96'), transferred('w96'),
        ), 3),
        Block(tuple(map(continued, ('continue', *STAGES))), 3),
        Block((sized(STATIC_75, 'w128'), transferred('w128')), 3),
    ),
    sizes={
        '': Size(64, (4e-3, 8e-3, 1.6e-2, 3.2e-2), rotary=True),
        'w96': Size(
            96, (4e-3, 8e-3, 1.6e-2, 3.2e-2), rotary=True, tokens_of=''
        ),
        'w128': Size(
            128, (4e-3, 8e-3, 1.6e-2, 3.2e-2), rotary=True, tokens_of=''
        ),
    },
    protocol='PROTOCOL-4.md',
)

BALANCED = 'blocks-8', 'blocks-16', 'blocks-32'
"""Structures of the scale blocks with equally many blocks in each column."""


def structured(structure: str) -> Arm:
  """Returns static 75 % with zeros in a structure."""
  return dataclasses.replace(STATIC_75, structure=structure)


def tuned_structured(structure: str) -> Arm:
  """Returns its dense fine-tuning, at the rate of that of zeros anywhere."""
  return tuned(structured(structure), rate_of=tuned(STATIC_75))


UNBALANCED = dataclasses.replace(
    structured('unbalanced-32'), rate_of=structured('blocks-32')
)


BLOCKS = dataclasses.replace(
    LLAMA,
    claims=('blocks', 'balance', 'blocks-ft'),
    blocks=(
        Block((STATIC_75, *map(structured, BALANCED), UNBALANCED), 5),
        Block(tuple(
            dataclasses.replace(arm, rate_of=STATIC_75)
            for arm in (DENSE, CONTROL)
        ), 3),
        Block((tuned(STATIC_75), *map(tuned_structured, BALANCED)), 5),
    ),
    sizes={'': Size(128, (8e-3, 1.6e-2, 3.2e-2), d_ff=384, rotary=True)},
    tokens_per_parameter=1.25,
    tasks={'task': ('e2e', 'e2e', 1)},
    protocol='PROTOCOL-5.md',
)

WIDE_BLOCKS = dataclasses.replace(
    BLOCKS,
    claims=('blocks-32', 'blocks-32-ft'),
    blocks=(
        Block((STATIC_75, structured('blocks-32')), 3),
        Block((tuned(STATIC_75), tuned_structured('blocks-32')), 3),
        Block(tuple(
            dataclasses.replace(arm, rate_of=STATIC_75)
            for arm in (DENSE, CONTROL)
        ), 2),
    ),
    sizes={'': Size(256, (4e-3, 8e-3, 1.6e-2), d_ff=768, rotary=True)},
    tokens_per_parameter=0.3186,  # as many steps as at width 128
    protocol='PROTOCOL-6.md',
)

SCALES = {
    'smoke': dataclasses.replace(
        FAIR, claims=('a', 'd-ft', 'e', 'g1', 'h'),
        sizes={'': Size(16, (1e-2,))},
        blocks=tuple(
            dataclasses.replace(block, seeds=1) for block in FAIR.blocks
        ),
        layers=1, length=48, batch_size=4, tokens_per_parameter=1.5,
        micro_batches=1, stages=('continue', 1.0), rounds=2, round_share=0.2,
        tune_steps=12, tune_rates=(1e-2,), corpus='',
        tasks={'task': ('python-docstrings', '', 20)}, batches=4,
        demonstration=True,
    ),
    'fair': FAIR,
    'flops': FLOPS,
    'flops-llama': FLOPS_LLAMA,
    'llama': LLAMA,
    'density': DENSITY,
    'blocks': BLOCKS,
    'wide-blocks': WIDE_BLOCKS,
}
"""Scales by name: for CI, for nights on two cores, and for some core-hours."""
