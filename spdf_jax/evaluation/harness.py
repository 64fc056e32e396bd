# SPDX-License-Identifier: Apache-2.0
"""EleutherAI's harness (lm-eval) on models in JAX, without PyTorch."""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
from typing import Any

from spdf_jax import extras
from spdf_jax.data import LibraryTokenizer
from spdf_jax.data import special_tokens
from spdf_jax.data import Tokenizer
from spdf_jax.evaluation import generation
from spdf_jax.evaluation import likelihood
from spdf_jax.evaluation.cached_decoding import Decoder
from spdf_jax.evaluation.likelihood import Continuation
from spdf_jax.evaluation.likelihood import Likelihood
from spdf_jax.evaluation.loss import ApplyFn

_CHUNK = 32  # Tokens generated before the first search for a stop string.


@dataclasses.dataclass(frozen=True)
class Subject:
  """A model to evaluate with the harness.

  Attributes:
    apply_fn: `(params, tokens_BxL) -> logits_BxLxV`.
    params: Parameters of the model.
    tokenizer: Tokenizer of the model.
    length: Maximum sequence length of the model, in tokens.
    decoder: Decoder for generation, e.g. `CachedModel(model)`; None: tasks
      that generate raise an error.
    batch_tokens: Number of tokens in a batch.
  """

  apply_fn: ApplyFn
  params: Any
  tokenizer: Tokenizer
  length: int
  decoder: Decoder | None = None
  batch_tokens: int = 4096


def harness_model(subject: Subject) -> Any:
  """Returns a model for EleutherAI's evaluation harness (lm-eval).

  The model scores in batches of few shapes (`score_continuations`) and
  generates greedily. Contexts are truncated on the left. Evaluation runs in one
  process: to use several devices, shard inside `apply_fn`. Results are those of
  the harness' `HFLM`, if the tokenizer encodes the text of special tokens as
  transformers does (`data.with_special_tokens`).

  Args:
    subject: Model to evaluate, with its parameters and tokenizer.

  Returns:
    A `lm_eval.api.model.TemplateLM` for `lm_eval.simple_evaluate(model=…)`.

  Raises:
    ImportError: lm-eval is not installed.
  """
  return _model_class()(subject)


@functools.cache
def _model_class() -> type:
  base = extras.require('lm_eval.api.model', 'harness').TemplateLM
  return type('SpdfModel', (_Methods, base), {})


class _Methods:
  """The methods that the harness calls on a model."""

  cache_hook: Any  # Set by the base class of the harness.

  def __init__(self, subject: Subject):
    super().__init__()
    self.subject = subject

  @property
  def eot_token_id(self) -> int:
    return self.subject.tokenizer.end_of_text

  @property
  def prefix_token_id(self) -> int:
    return special_tokens.begin_of(self.subject.tokenizer)

  @property
  def tokenizer_name(self) -> str:
    return self.subject.tokenizer.fingerprint

  def tok_encode(
      self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
  ) -> list[int]:
    del kwargs
    ids = self.subject.tokenizer.encode(string)
    if add_special_tokens is False:
      return ids
    return special_tokens.begun(self.subject.tokenizer, ids)

  def _loglikelihood_tokens(
      self, requests: Sequence[Any], **kwargs: Any
  ) -> list[Likelihood]:
    del kwargs
    results = self._score([
        Continuation(
            # A context may be empty, but a target needs a token before it.
            context or [self.prefix_token_id],
            # It is empty if one token spans its text and the context's end.
            target or self.tok_encode(key[1], add_special_tokens=False),
        )
        for key, context, target in requests
    ])
    for (key, _, _), result in zip(requests, results):
      if key is not None:
        self.cache_hook.add_partial('loglikelihood', key, result)
    return results

  def loglikelihood_rolling(
      self, requests: Sequence[Any], disable_tqdm: bool = False
  ) -> list[float]:
    del disable_tqdm
    texts = [request.args[0] for request in requests]
    # As in all models of the harness, a beginning of text that the tokenizer
    # adds is also the first target.
    scores = self._score([
        Continuation([self.prefix_token_id], self.tok_encode(text))
        for text in texts
    ])
    results = [score.log_probability for score in scores]
    for text, result in zip(texts, results):
      self.cache_hook.add_partial('loglikelihood_rolling', (text,), result)
    return results

  def generate_until(
      self, requests: Sequence[Any], disable_tqdm: bool = False
  ) -> list[str]:
    del disable_tqdm
    decoder = self.subject.decoder
    if decoder is None:
      raise ValueError(
          'the task generates text, but subject.decoder is None; give a '
          'decoder, e.g. CachedModel(model).'
      )
    groups: dict[tuple[tuple[str, ...], int], list[int]] = {}
    for number, request in enumerate(requests):
      given = _settings(request.args[1], self.subject.tokenizer)
      groups.setdefault(given, []).append(number)
    results = [''] * len(requests)
    for (stops, most), numbers in groups.items():
      texts = self._generate(
          decoder, [requests[i].args[0] for i in numbers], stops, most
      )
      for i, text in zip(numbers, texts):
        results[i] = text
        self.cache_hook.add_partial('generate_until', requests[i].args, text)
    return results

  def _score(self, continuations: Sequence[Continuation]) -> list[Likelihood]:
    """Scores continuations, in windows where they exceed the context."""
    windows = [
        _windows(context, target, self.subject.length)
        for context, target in continuations
    ]
    scores = iter(likelihood.score_continuations(
        self.subject.apply_fn,
        self.subject.params,
        [window for group in windows for window in group],
        length=self.subject.length,
        batch_tokens=self.subject.batch_tokens,
    ))
    parts = [[next(scores) for _ in group] for group in windows]
    return [
        Likelihood(
            sum(part.log_probability for part in group),
            all(part.greedy for part in group),
        )
        for group in parts
    ]

  def _generate(
      self, decoder: Decoder, contexts: Sequence[str], stops: tuple[str, ...],
      most: int,
  ) -> list[str]:
    """Continues texts until each has reached a stop, in growing chunks."""
    length, tokenizer = self.subject.length, self.subject.tokenizer
    if most >= length:
      raise ValueError(
          f'max_gen_toks is {most}, and the model has {length} positions for '
          f'prompt and answer; set it to at most {length - 1}, or give a task '
          'that generates fewer tokens.'
      )
    prompts = [
        (self.tok_encode(text) or [self.prefix_token_id])[-(length - most):]
        for text in contexts
    ]
    made: list[list[int]] = [[] for _ in prompts]
    ends = special_tokens.special_of(tokenizer).ends
    # The harness shows an end that is an ordinary token, such as a line break.
    shown = any(tokenizer.decode([end]) for end in ends)

    def extend(numbers, width, count, ends):
      chunks = generation.generate(
          decoder,
          self.subject.params,
          [prompts[i] + made[i] for i in numbers],
          max_new_tokens=count,
          end_of_text=ends,
          batch_size=max(self.subject.batch_tokens // width, 1),
          length=length,
      )
      for i, chunk in zip(numbers, chunks):
        made[i] += chunk
      return [i for i, chunk in zip(numbers, chunks) if len(chunk) < count]

    going = list(range(len(prompts)))
    start, count = 0, min(_CHUNK, most)
    while going:
      for width, numbers in _by_width(going, prompts, length).items():
        ended = extend(numbers, width, count, ends)
        if shown:
          extend(ended, width, 1, [-1])
        for i in numbers:
          text = tokenizer.decode(made[i])
          if i in ended or _cut(text, stops) != text:
            going.remove(i)
      start += count
      # Each chunk length requires a compilation, so lengths grow threefold.
      count = min(2 * start, most - start)
      if not count:
        break
    return [_cut(tokenizer.decode(tokens), stops) for tokens in made]


def _by_width(
    going: Sequence[int], prompts: Sequence[Sequence[int]], length: int
) -> Mapping[int, list[int]]:
  widths: dict[int, list[int]] = {}
  for i in going:
    width = min(1 << (len(prompts[i]) - 1).bit_length(), length)
    widths.setdefault(max(width, _CHUNK), []).append(i)
  return widths


def _windows(
    context: Sequence[int], target: Sequence[int], length: int
) -> list[Continuation]:
  """Returns windows of at most `length` targets, by the harness' own rule."""
  if 0 < len(target) <= length:
    return [Continuation(context, target)]
  utils = extras.require('lm_eval.utils', 'harness')
  return [
      Continuation(*utils.make_disjoint_window(window))
      for window in utils.get_rolling_token_windows(
          list(target), context[-1], max_seq_len=length, context_len=1
      )
  ]


def _settings(
    given: Mapping[str, Any], tokenizer: Tokenizer
) -> tuple[tuple[str, ...], int]:
  """Returns stop strings and the number of tokens; requires greedy decoding."""
  utils = extras.require('lm_eval.models.utils', 'harness')
  settings = utils.normalize_gen_kwargs(dict(given))
  if settings['do_sample']:
    raise ValueError(
        f'generation settings {dict(given)} use sampling; set do_sample to'
        ' false.'
    )
  end = None
  if isinstance(tokenizer, LibraryTokenizer):
    end = tokenizer.model.id_to_token(tokenizer.end_of_text)
  stops = utils.handle_stop_sequences(settings['until'], end)
  return tuple(stops), settings['max_gen_toks']


def _cut(text: str, stops: Sequence[str]) -> str:
  """Returns the text up to the first stop string."""
  utils = extras.require('lm_eval.models.utils', 'harness')
  return utils.postprocess_generated_text(text, list(stops), None)
