"""Beam search agrees with plain loops over lists, including where it ends."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spdf_jax import models
from spdf_jax.evaluation import beam_search
from spdf_jax.evaluation import BeamSearch
from spdf_jax.evaluation import CachedModel
from spdf_jax.evaluation import PROTOCOLS
from tests.recomputed import Recomputed
from tests.tiers import ci_except

V, LENGTH, ROOM = 5, 9, 5
PROMPTS = [[3], [1, 4, 2], [4, 4]]


@dataclasses.dataclass(frozen=True)
class Table:
  """A decoder whose logits depend on the last two tokens."""

  batch_axis, length_axis = 0, 1

  def create_cache(self, batch_size, length):
    return jnp.zeros((batch_size, length), jnp.int32)

  def __call__(self, table, cache, tokens_BxL, positions_BxL):
    rows = jnp.arange(len(cache))[:, None]
    cache = cache.at[rows, positions_BxL].set(tokens_BxL)
    before = cache[rows, jnp.maximum(positions_BxL - 1, 0)]
    return table[before, tokens_BxL], cache


def make_table(seed, scale=2.0):
  rng = np.random.default_rng(seed)
  return (scale * rng.standard_normal((V, V, V))).astype(np.float32)


def log_probabilities(table, sequence, banned=()):
  logits = table[sequence[max(len(sequence) - 2, 0)], sequence[-1]]
  logits = logits.astype(np.float64)
  logits[list(banned)] = -np.inf
  return logits - np.log(np.exp(logits).sum())


def banned_by(new, size):
  """Returns tokens that would repeat an n-gram of `size` tokens."""
  if not size:
    return set()
  last = new[len(new) - size + 1:]
  return {
      new[i + size - 1] for i in range(len(new) - size + 1)
      if new[i:i + size - 1] == last
  } if len(new) >= size - 1 else set()


def plain_search(table, prompt, search, room, ends):
  """Runs the protocol on lists of running and finished beams."""
  live, over = [(0.0, [])], []
  for step in range(room):
    scored = []
    for total, new in live:
      logs = log_probabilities(
          table, prompt + new, banned_by(new, search.no_repeat_ngram)
      )
      scored += [(total + logs[v], new + [v]) for v in range(V)]
    scored.sort(key=lambda pair: -pair[0])
    penalty = (step + 1) ** search.length_penalty
    for total, new in scored[:search.beams]:
      if new[-1] in ends and total > -np.inf:
        over.append((total / penalty, new[:-1]))
    if not search.refill:
      scored = scored[:search.beams]
    live = [pair for pair in scored if pair[1][-1] not in ends]
    live = live[:search.beams]
  over += [(total / room ** search.length_penalty, new) for total, new in live]
  return max(over, key=lambda pair: pair[0])[1]


def run(table, prompts=PROMPTS, search=PROTOCOLS['standard'], room=ROOM,
        ends=(0,), batch_size=3):
  return beam_search(
      Table(), table, prompts, search=search, max_new_tokens=room,
      end_of_text=ends, batch_size=batch_size, length=LENGTH,
  )


@pytest.mark.parametrize('search, ends', [
    (BeamSearch(3, length_penalty=0.4), (0, 2)),
    (BeamSearch(3, no_repeat_ngram=2), (0,)),
    (BeamSearch(4, 0.8, no_repeat_ngram=3, refill=False), (0, 1)),
    *ci_except([], [
        (BeamSearch(1), (0,)),
        (BeamSearch(3), (0,)),
        (BeamSearch(2, length_penalty=2.0), (0,)),
        (BeamSearch(3, length_penalty=0.0), (0,)),
        (BeamSearch(4, 0.8, no_repeat_ngram=1, refill=False), (0,)),
        (BeamSearch(2, 0.8, refill=False), (0, 1)),
    ]),
])
def test_the_search_equals_plain_loops(search, ends):
  for seed in range(12):
    table = make_table(seed)
    want = [plain_search(table, p, search, ROOM, ends) for p in PROMPTS]
    assert run(table, search=search, ends=ends) == want, seed


@pytest.mark.parametrize('refill', [True, False])
@pytest.mark.parametrize(
    'length_penalty', ci_except([0.7], [0.0, 0.7, 1.5])
)
def test_with_as_many_beams_as_continuations_the_best_one_is_found(
    refill, length_penalty
):
  room = 3
  search = BeamSearch(V ** room, length_penalty, refill=refill)
  every = [
      list(new) for n in range(1, room + 1)
      for new in itertools.product(range(V), repeat=n)
      if 0 not in new[:-1] and (n == room or new[-1] == 0)
  ]
  for seed in range(4):
    table = make_table(seed)

    def score(new, table=table):
      logs = [
          log_probabilities(table, PROMPTS[1] + new[:i])[new[i]]
          for i in range(len(new))
      ]
      return sum(logs) / len(new) ** length_penalty

    best = max(every, key=score)
    (text,) = run(
        table, PROMPTS[1:2], search, room=room, batch_size=1
    )
    assert text == (best[:-1] if best[-1] == 0 else best)


def test_refilling_beams_changes_the_result():
  both = [
      [run(make_table(seed), search=BeamSearch(2, 0.8, refill=refill))
       for seed in range(12)]
      for refill in (True, False)
  ]
  assert both[0] != both[1]


@pytest.mark.ci
def test_the_result_of_the_search_does_not_depend_on_the_batch():
  table = make_table(5)
  assert run(table, batch_size=1) == run(table, batch_size=2) == run(table)
  assert run(table, ends=np.int64(0)) == run(table, ends=0) == run(table)


def test_the_search_stops_when_no_continuation_can_score_higher():
  calls = []

  @dataclasses.dataclass(frozen=True)
  class Counting(Table):

    def __call__(self, *args):
      jax.debug.callback(lambda: calls.append(1), ordered=True)
      return super().__call__(*args)

  ends_at_once = np.zeros((V, V, V), np.float32)
  ends_at_once[..., 0] = 50.0
  texts = beam_search(
      Counting(), ends_at_once, PROMPTS, max_new_tokens=100, end_of_text=0,
      batch_size=3, length=200,
  )
  assert texts == [[], [], []]
  assert len(calls) == 2  # One call for the prompts, one for the end.


@pytest.mark.parametrize('refill', [True, False])
def test_a_beam_that_no_token_may_extend_ends_with_what_it_has(refill):
  search = BeamSearch(120, no_repeat_ngram=1, refill=refill)
  table = make_table(0)
  for prompt, text in zip(PROMPTS, run(table, search=search, room=6, ends=())):

    def total(new, prompt=prompt):
      return sum(
          log_probabilities(table, prompt + new[:i], new[:i])[new[i]]
          for i in range(V)
      )

    assert text == max(map(list, itertools.permutations(range(V))), key=total)


@pytest.mark.ci
def test_beams_of_a_model_keep_their_own_cache():
  model = models.create_model(
      'gpt-mini', vocab_size=13, n_layers=2, n_heads=2, d_model=16, d_ff=24,
      max_length=32, scan_layers=True,
  )
  rng = np.random.default_rng(3)
  tokens = jnp.zeros((1, 2), jnp.int32)
  params = jax.tree.map(
      lambda x: rng.normal(0, 0.5, x.shape).astype(x.dtype),
      jax.eval_shape(model.init, jax.random.key(0), tokens)['params'],
  )
  apply_fn = lambda params, tokens: model.apply({'params': params}, tokens)
  cached, recomputed = (
      [
          beam_search(
              decoder, params, PROMPTS,
              search=BeamSearch(beams, no_repeat_ngram=1),
              max_new_tokens=6, end_of_text=0, batch_size=3, length=32,
          )
          for beams in (1, 4)
      ]
      for decoder in (CachedModel(model), Recomputed(apply_fn))
  )
  assert cached == recomputed
  assert cached[0] != cached[1]


@pytest.mark.parametrize('fields, message', [
    (dict(beams=0), 'beams is 0; give at least 1'),
    (dict(no_repeat_ngram=-1), 'no_repeat_ngram is -1; give 0 or more'),
    (dict(length_penalty=np.nan), 'length_penalty is nan; give a finite'),
])
def test_invalid_beam_search_settings_are_refused(fields, message):
  with pytest.raises(ValueError, match=message):
    BeamSearch(**fields)
