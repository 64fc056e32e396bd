"""Continuations, LAMBADA and WikiText against one unbatched computation."""

import json
import math

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.scores import wikitext
from experiments.scores.lambada import last_token
from experiments.scores.lambada import last_word
from experiments.scores.lambada import read_lambada
from experiments.scores.lambada import score_lambada
from experiments.scores.task_scores import target_loss
from spdf_jax import models
from spdf_jax.data import ByteTokenizer
from spdf_jax.data import open_tokenizer
from spdf_jax.data import Pair
from spdf_jax.data.tokenizers import library_tokenizer
from spdf_jax.evaluation import CachedModel
from spdf_jax.evaluation import Continuation
from spdf_jax.evaluation import score_continuations
from spdf_jax.evaluation import Subject
from tests.real_data import data_path

LENGTH = 48


def byte_subject(length, n_layers=1):
  """A random model of bytes, and its parameters."""
  model = models.create_model(
      'gpt-mini', vocab_size=257, max_length=length, n_layers=n_layers,
      d_model=32, n_heads=2, d_ff=64,
  )
  tokens = jnp.zeros((1, 2), jnp.int32)
  params = model.init(jax.random.key(0), tokens)['params']
  # Far from uniform, so that a likeliest token is a matter of context.
  params = jax.tree.map(lambda x: 6.0 * x, params)
  return Subject(
      jax.jit(lambda p, t: model.apply({'params': p}, t)), params,
      ByteTokenizer(), length, CachedModel(model), batch_tokens=2048,
  )


@pytest.fixture(scope='module')
def subject():
  return byte_subject(LENGTH)


def likelihoods(subject, continuations, length=LENGTH, **options):
  return score_continuations(
      subject.apply_fn, subject.params, continuations, length=length, **options
  )


def directly(subject, context, target):
  """Scores one continuation alone, in float64 after the model."""
  length = subject.length
  ids = [*context, *target][-length - 1:-1]
  padded = jnp.array([ids + [0] * (length - len(ids))])  # One shape to compile.
  logits = np.asarray(
      subject.apply_fn(subject.params, padded), np.float64
  )[0][len(ids) - len(target):len(ids)]
  shifted = logits - logits.max(axis=-1, keepdims=True)
  log = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
  chosen = log[np.arange(len(target)), list(target)]
  return chosen.sum(), bool((logits.argmax(axis=-1) == target).all())


def drawn(seed, count):
  rng = np.random.default_rng(seed)
  return [
      Continuation(
          rng.integers(0, 257, rng.integers(1, 70)).tolist(),
          rng.integers(0, 257, rng.integers(1, 40)).tolist(),
      )
      for _ in range(count)
  ]


@pytest.mark.ci
@pytest.mark.parametrize('batch_tokens', [1, 5000])
def test_batches_change_no_likelihood(subject, batch_tokens):
  continuations = drawn(0, 12)
  # Some that greedy decoding finds.
  for context, _ in drawn(1, 3):
    ids = list(context)[-20:]
    for _ in range(3):
      logits = subject.apply_fn(subject.params, jnp.array([ids]))
      ids.append(int(logits[0, -1].argmax()))
    continuations.append(Continuation(ids[:-3], ids[-3:]))
  actual = likelihoods(subject, continuations, batch_tokens=batch_tokens)
  expected = [directly(subject, *one) for one in continuations]
  assert [f.greedy for f in actual] == [e[1] for e in expected]
  assert [e[1] for e in expected][-3:] == [True] * 3
  np.testing.assert_allclose(
      [f.log_probability for f in actual], [e[0] for e in expected], rtol=2e-5
  )


@pytest.mark.ci
def test_few_shapes_are_compiled():
  shapes = set()

  def apply_fn(params, tokens):
    shapes.add(tokens.shape)
    return jnp.zeros((*tokens.shape, 300))

  score_continuations(
      apply_fn, None, drawn(0, 300), length=1000, batch_tokens=1024
  )
  assert shapes == {(32, 32), (16, 64), (8, 128)}


def test_inputs_that_cannot_be_scored_are_refused(subject):
  with pytest.raises(ValueError, match='context 1 is empty'):
    likelihoods(subject, [Continuation([1], [2]), Continuation([], [2])])
  with pytest.raises(ValueError, match='target 0 is empty; give the tokens'):
    likelihoods(subject, [Continuation([1], [])])
  with pytest.raises(ValueError, match='target 0 has 9 tokens, more than len'):
    likelihoods(subject, [Continuation([1], [2] * 9)], length=8)
  for token in (-1, 257):
    for pair in ([token], [2]), ([1], [token]):
      with pytest.raises(ValueError, match=f'has the token {token}; token ids'):
        likelihoods(subject, [Continuation(*pair)])
  assert likelihoods(subject, []) == []


@settings(deadline=None)
@given(st.integers(2, 80), st.integers(1, 9), st.integers(1, 9))
def test_overlapping_windows_are_those_of_megatron(count, length, stride):
  stride = min(stride, length)
  windows = wikitext.overlapping_windows(list(range(count)), length, stride)
  assert sum((list(w.target) for w in windows), []) == list(range(1, count))
  for number, (context, target) in enumerate(windows):
    whole = [*context, *target]
    first = number * stride
    assert whole == list(range(first, min(first + length + 1, count)))
    # Of every window but the first the last `stride` targets count.
    assert number == 0 or len(target) <= stride


@pytest.mark.ci
def test_real_wikitext_has_megatrons_numbers_of_words_and_tokens():
  text = data_path('wikitext2/wiki.test.tokens').read_text('utf-8')
  tokenizer = open_tokenizer(data_path('gpt2_bpe'))
  assert len(text.strip().split(' ')) == 245_566
  assert len(tokenizer.encode(wikitext.detokenize_wikitext(text))) == 278_365


def test_adjusted_perplexity_is_per_word(subject):
  text = 'A b @-@ c , d .\n = E =\n' * 6
  scores = wikitext.adjusted_perplexity(subject, text, stride=7)
  tokens = list(wikitext.detokenize_wikitext(text).encode())
  windows = wikitext.overlapping_windows(tokens, LENGTH, 7)
  nats = -sum(directly(subject, *window)[0] for window in windows)
  assert scores['tokens'] == len(tokens)
  assert scores['words'] == len(text.strip().split(' '))
  assert scores['loss'] == pytest.approx(nats / (len(tokens) - 1), rel=1e-5)
  assert scores['adjusted_perplexity'] == pytest.approx(
      math.exp(min(nats / (scores['words'] - 1), 700)), rel=1e-3
  )


def test_only_targets_and_their_ends_count_in_their_loss(subject):
  pairs = [Pair('An article', 'Its sum'), Pair('x' * 90, 'b'), Pair('', 'c')]
  score = target_loss(subject, pairs, batch_size=2)
  nats = tokens = 0
  for pair in pairs:
    target = [*f' {pair.target}'.encode(), 256]
    context = [*pair.context.encode()[:LENGTH - len(target)], 256]
    nats -= directly(subject, context, target)[0]
    tokens += len(target)
  assert score.tokens == tokens
  assert score.loss == pytest.approx(nats / tokens, rel=1e-5)
  assert score.perplexity == pytest.approx(math.exp(nats / tokens), rel=1e-4)


PASSAGES = [
    ('The bell rang over the', 'harbour'), ('She opened the', 'door'),
    ('They never found the old', 'lighthouse'), ('I', 'am'),
]


@pytest.mark.ci
def test_both_protocols_of_lambada_equal_a_direct_computation(subject):
  tokenizer = ByteTokenizer()
  for protocol, target_of in (
      ('lambada_last_word', last_word), ('lambada_megatron', last_token)
  ):
    scores = score_lambada(subject, PASSAGES, protocol)
    expected = [
        directly(subject, *target_of(tokenizer, *p)) for p in PASSAGES
    ]
    assert scores['items'] == 4
    assert scores['accuracy'] == np.mean([greedy for _, greedy in expected])
    assert scores['perplexity'] == pytest.approx(
        math.exp(-np.mean([log for log, _ in expected])), rel=1e-3
    )
  assert last_token(tokenizer, 'I', 'am').target == [ord('m')]
  assert bytes(last_word(tokenizer, 'I', 'am').target) == b' am'


def test_a_word_that_a_token_joins_to_its_context_is_a_target():
  tokenizers = pytest.importorskip('tokenizers')
  # Words are not split, so that one token is 'to be'.
  model = tokenizers.Tokenizer(tokenizers.models.BPE())
  model.train_from_iterator(
      ['to be'] * 9, tokenizers.trainers.BpeTrainer(
          special_tokens=['</s>'], show_progress=False
      ),
  )
  tokenizer = library_tokenizer(model.to_str())
  (whole,) = tokenizer.encode('to be')
  context, target = last_word(tokenizer, 'to', 'be')
  assert context == tokenizer.encode('to')
  assert target == tokenizer.encode(' be') and whole not in target


@pytest.mark.ci
def test_real_lambada_has_mostly_words_of_one_token():
  passages = read_lambada(data_path('lm_eval_tasks/data/lambada_openai.jsonl'))
  tokenizer = open_tokenizer(data_path('gpt2_bpe'))
  assert len(passages) == 5_153
  single = sum(len(last_word(tokenizer, *p).target) == 1 for p in passages)
  assert single == 4_010


def test_lambada_in_both_formats(tmp_path):
  path = tmp_path / 'lambada.jsonl'
  path.write_text(
      json.dumps({'text': 'Say it\nnow, friend'}) + '\n\n'
      + json.dumps({'context': 'Say it\nnow,', 'continuation': 'friend'})
  )
  assert read_lambada(path) == [('Say it\nnow,', 'friend')] * 2


@pytest.mark.parametrize('line', ['{"text": "one"}', '[]', '{'])
def test_bad_lines_of_lambada_are_named(tmp_path, line):
  path = tmp_path / 'lambada.jsonl'
  path.write_text(f'{{"text": "a b"}}\n{line}\n')
  with pytest.raises(ValueError, match=r'lambada.jsonl line 2 cannot be read'):
    read_lambada(path)
