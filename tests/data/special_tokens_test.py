"""Special tokens are those that a model's own files state, everywhere."""

import json
import logging
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import preparation
from experiments.scores import lambada
from spdf_jax import data
from spdf_jax import evaluation
from spdf_jax import models
from spdf_jax.data import special_tokens
from spdf_jax.data import tokenizer_files
from spdf_jax.data.special_tokens import SpecialTokens
from spdf_jax.interop import configs
from spdf_jax.runs import lifecycle

tokenizers = pytest.importorskip('tokenizers')

UNK, BEGIN, END, TURN = range(4)


def write_llama(folder, *, template=True, **files):
  """Writes a tokenizer.json with `<s>` and others, and files beside it."""
  model = tokenizers.Tokenizer(tokenizers.models.BPE())
  level = tokenizers.pre_tokenizers.ByteLevel
  model.pre_tokenizer = level(add_prefix_space=False)
  model.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
      vocab_size=270, special_tokens=['<unk>', '<s>', '</s>', '<|eot|>'],
      initial_alphabet=level.alphabet(), show_progress=False,
  )
  model.train_from_iterator(['to be or not'] * 3, trainer)
  if template:
    model.post_processor = tokenizers.processors.TemplateProcessing(
        single='<s> $A', special_tokens=[('<s>', BEGIN)]
    )
  folder.mkdir(exist_ok=True)
  model.save(str(folder / 'tokenizer.json'))
  for name, fields in files.items():
    (folder / f'{name}.json').write_text(json.dumps(fields))
  return folder


LLAMA = dict(model_type='llama', vocab_size=270)


@pytest.mark.parametrize('files, want', [
    (dict(config=LLAMA | dict(eos_token_id=2)),
     SpecialTokens(BEGIN, True, (END,))),
    (dict(config=LLAMA | dict(eos_token_id=[2, 3])),
     SpecialTokens(BEGIN, True, (END, TURN))),
    (dict(config=LLAMA | dict(eos_token_id=2),
          generation_config=dict(eos_token_id=[2, 3])),
     SpecialTokens(BEGIN, True, (END, TURN))),
    (dict(tokenizer_config=dict(eos_token={'content': '<|eot|>'}),
          config=LLAMA | dict(eos_token_id=2)),
     SpecialTokens(BEGIN, True, (TURN, END))),
    (dict(special_tokens_map=dict(eos_token='<|eot|>')),
     SpecialTokens(BEGIN, True, (TURN,))),
    (dict(tokenizer_config=dict(
        tokenizer_class='LlamaTokenizerFast', add_bos_token=False,
        bos_token='<s>', eos_token='</s>')),
     SpecialTokens(BEGIN, False, (END,))),
    (dict(template=False, tokenizer_config=dict(
        tokenizer_class='LlamaTokenizer', add_bos_token=True,
        bos_token='<s>', eos_token='</s>')),
     SpecialTokens(BEGIN, True, (END,))),
    (dict(template=False, config=dict(
        model_type='gpt2', vocab_size=270, bos_token_id=50256,
        eos_token_id=[3, 50256])),
     SpecialTokens(None, False, (TURN,))),
])
def test_files_of_a_model_give_its_special_tokens(files, want, tmp_path):
  tokenizer = data.open_tokenizer(write_llama(tmp_path / 'model', **files))
  assert special_tokens.special_of(tokenizer) == want
  assert tokenizer.end_of_text == want.ends[0]
  tokenizer_files.save_tokenizer(tmp_path / 'saved.json', tokenizer)
  again = data.open_tokenizer(tmp_path / 'saved.json')
  assert special_tokens.special_of(again) == want
  assert again.fingerprint == tokenizer.fingerprint
  assert again.encode('to be') == tokenizer.encode('to be')
  begun = special_tokens.begun(tokenizer, tokenizer.encode('to'))
  assert (begun[0] == BEGIN) == want.adds_begin
  folder = tmp_path / 'export'
  folder.mkdir()
  data.export_tokenizer(folder / 'tokenizer.json', tokenizer)
  again = data.open_tokenizer(folder)
  assert special_tokens.begun(again, again.encode('to')) == begun
  alone = tokenizers.Tokenizer.from_file(str(folder / 'tokenizer.json'))
  assert alone.encode('to').ids == begun
  assert special_tokens.begin_of(tokenizer) == (
      want.ends[0] if want.begin is None else want.begin
  )


@pytest.mark.parametrize('files, warning, want', [
    (dict(config=LLAMA | dict(bos_token_id=3, eos_token_id=2)),
     'tokens [1, 3] as the beginning of a text; 1 is used',
     SpecialTokens(BEGIN, True, (END,))),
    (dict(tokenizer_config=dict(eos_token='<|eot|>'),
          config=LLAMA | dict(eos_token_id=2)),
     'with 3, and the configs of the model end it with [2]; generation stops',
     SpecialTokens(BEGIN, True, (TURN, END))),
    (dict(config=LLAMA | dict(eos_token_id=[2, 270, -1])),
     'name [-1, 270] as eos_token_id, outside the vocabulary of 268 tokens',
     SpecialTokens(BEGIN, True, (END,))),
    (dict(tokenizer_config=dict(
        tokenizer_class='LlamaTokenizer', add_bos_token=False, eos_token='</s>'
    )), 'contradicts the tokenizer itself; texts do not begin with token 1',
     SpecialTokens(BEGIN, False, (END,))),
    (dict(tokenizer_config=dict(add_bos_token=False, eos_token='</s>')),
     'contradicts the tokenizer itself; texts begin with token 1',
     SpecialTokens(BEGIN, True, (END,))),
    (dict(tokenizer_config=dict(eos_token='</s>', chat_template='{{ x }}')),
     'has a chat template, which is not applied',
     SpecialTokens(BEGIN, True, (END,))),
    (dict(tokenizer_config=dict(eos_token='</s>', add_bos_token=True),
          config=LLAMA | dict(eos_token_id=[3, 2], bos_token_id=1)), None,
     SpecialTokens(BEGIN, True, (END, TURN))),
])
def test_files_that_contradict_each_other_give_a_warning(
    files, warning, want, tmp_path, caplog
):
  with caplog.at_level(logging.WARNING):
    tokenizer = data.open_tokenizer(write_llama(tmp_path / 'model', **files))
  assert special_tokens.special_of(tokenizer) == want
  said = [record.getMessage() for record in caplog.records]
  if warning is None:
    assert not said
  else:
    assert len(said) == 1 and warning in said[0]


def test_a_tokenizer_without_an_end_is_refused(tmp_path):
  model = tokenizers.Tokenizer(tokenizers.models.WordLevel(
      {'to': 0, '<unk>': 1}, unk_token='<unk>'
  ))
  model.save(str(tmp_path / 'tokenizer.json'))
  with pytest.raises(ValueError, match='that could end a document; add one'):
    data.open_tokenizer(tmp_path)


def test_an_end_of_text_known_by_name_only_gives_a_warning(tmp_path, caplog):
  folder = write_llama(tmp_path / 'model')
  with caplog.at_level(logging.WARNING):
    tokenizer = data.open_tokenizer(folder)
  assert tokenizer.end_of_text == END
  assert "states which token ends a text; '</s>' does" in caplog.text


NAMED = [
    dict(tokenizer_config=dict(unk_token='to', eos_token='</s>')),
    dict(tokenizer_config=dict(
        pad_token={'content': 'to', 'lstrip': False}, eos_token='</s>'
    )),
    dict(tokenizer_config=dict(
        additional_special_tokens=['to'], eos_token='</s>'
    )),
    dict(tokenizer_config=dict(extra_special_tokens={'x': 'to'})),
    dict(tokenizer_config=dict(added_tokens_decoder={
        '0': dict(content='<unk>', special=True),
        '265': dict(content='to', special=True),
    })),
    dict(special_tokens_map=dict(mask_token='to')),
]


@pytest.mark.parametrize('files', NAMED)
def test_a_token_that_only_a_config_names_is_special(files, tmp_path):
  folder = write_llama(tmp_path / 'model', **files)
  plain = data.open_tokenizer(folder)
  tokenizer = data.with_special_tokens(plain)
  # As transformers, which adds every such token to the tokenizer.
  direct = tokenizers.Tokenizer.from_file(str(folder / 'tokenizer.json'))
  assert direct.token_to_id('to') is not None
  before = direct.encode('torn be', add_special_tokens=False).ids
  direct.add_special_tokens(['to'])
  ids = direct.encode('torn be', add_special_tokens=False).ids
  assert ids != before
  assert plain.encode('torn be') == before
  assert tokenizer.encode('torn be') == ids
  tokenizer_files.save_tokenizer(tmp_path / 'saved.json', tokenizer)
  assert data.open_tokenizer(tmp_path / 'saved.json').encode('torn be') == ids


def test_a_special_token_outside_the_vocabulary_is_left_out(tmp_path):
  folder = write_llama(
      tmp_path / 'model',
      tokenizer_config=dict(unk_token='<none>', eos_token='</s>'),
  )
  assert data.open_tokenizer(folder).vocab_size == 268
  ours = data.train_bpe(['to be or not'] * 3, 262)
  folder = tmp_path / 'ours'
  folder.mkdir()
  data.export_tokenizer(folder / 'tokenizer.json', ours)
  assert data.open_tokenizer(folder).fingerprint == ours.fingerprint
  config = {'unk_token': 'to', 'eos_token': '<|endoftext|>'}
  (folder / 'tokenizer_config.json').write_text(json.dumps(config))
  tokenizer = data.with_special_tokens(data.open_tokenizer(folder))
  assert ours.model.token_to_id('to') in tokenizer.encode('torn')
  assert ours.model.token_to_id('to') not in ours.encode('torn')


def test_a_text_that_spells_the_begin_token_gets_no_second_one(llama):
  tokenizer = data.with_special_tokens(llama)
  for text in ('<s>to', 'to'):
    ids = special_tokens.begun(tokenizer, tokenizer.encode(text))
    assert ids == [BEGIN, *llama.encode('to')]


@pytest.fixture
def llama(tmp_path):
  return data.open_tokenizer(write_llama(
      tmp_path / 'model', config=LLAMA | dict(eos_token_id=[2, 3])
  ))


def test_our_own_tokenizers_add_no_beginning_of_text():
  tokenizer = data.ByteTokenizer()
  assert special_tokens.begun(tokenizer, [97]) == [97]
  assert special_tokens.special_of(tokenizer).ends == (256,)
  assert 'special' not in json.loads(tokenizer.to_json())


def test_the_begin_token_precedes_texts_in_scoring_and_training(
    llama, tmp_path
):
  for read in (lambada.last_word, lambada.last_token):
    assert read(llama, 'to be', 'or').context[0] == BEGIN
  pairs = data.encode_pairs([data.Pair('to be', 'or')], llama, 32)
  assert pairs.tokens[0] == BEGIN
  path = tmp_path / 'a.jsonl'
  path.write_text(''.join(
      json.dumps({'text': f'to be {i}'}) + '\n' for i in range(40)
  ))
  corpus = preparation.prepare_files(
      path, tokenizer=tmp_path / 'model', output=tmp_path / 'corpus',
      validation=0.1, test=0.1,
  )
  ids = np.asarray(corpus.train.tokens)
  ends = np.flatnonzero(ids == END)
  assert len(ends) > 20
  assert (ids[ends + 1] == BEGIN).all()
  assert (ids == BEGIN).sum() == len(ends)
  texts = dict.fromkeys(('train', 'validation', 'test'), ['to be', 'or'])
  written = data.write_corpus(tmp_path / 'written', texts, llama)
  ids = written.train.tokens.tolist()
  assert ids.count(BEGIN) == 2 and ids[0] == BEGIN == ids[ids.index(END) + 1]


def test_generation_stops_at_every_end():
  model = models.create_model('gpt-mini', vocab_size=64)
  params = model.init(
      jax.random.key(0), jnp.zeros((1, 2), jnp.int32)
  )['params']
  decoder = evaluation.CachedModel(model)
  given = dict(max_new_tokens=8, batch_size=2, length=32)
  (free,) = evaluation.generate(
      decoder, params, [[3]], end_of_text=63, **given
  )
  stop = free[2]
  want = free[:free.index(stop)]
  for ends in ([63, stop], [stop, 63], stop):
    assert evaluation.generate(
        decoder, params, [[3]], end_of_text=ends, **given
    ) == [want]
    assert list(evaluation.stream(
        decoder, params, [3], end_of_text=ends, max_new_tokens=8, length=32
    )) == want


def test_generations_of_a_run_stop_at_every_end(llama, tmp_path, monkeypatch):
  ends = []
  monkeypatch.setattr(
      evaluation, 'task_evaluator',
      lambda generate, *_, **__: ends.append(generate.keywords['end_of_text']),
  )
  split = SimpleNamespace(
      tokens=np.arange(64), description=dict(tokens=64, bytes=64)
  )
  run = SimpleNamespace(
      config=SimpleNamespace(evaluation=SimpleNamespace(
          batch_size=2, corpus_batches=1, task_batches=1, generations=1,
          max_new_tokens=4,
      )),
      real_data=(
          SimpleNamespace(tokenizer=llama, validation=split),
          SimpleNamespace(
              validation=[data.Pair('to be', 'or')] * 2,
              inputs_of=lambda split: [
                  SimpleNamespace(context='to be', references=['or'])
              ],
          ),
      ),
      model=models.create_model('gpt-mini', vocab_size=270, max_length=16),
      plan=SimpleNamespace(phases=[]), validation_length=16, workdir=tmp_path,
  )
  lifecycle.evaluators(run)
  assert ends == [(END, TURN)]


def test_exported_configs_have_all_end_tokens_and_the_begin_token(caplog):
  fields = LLAMA | dict(eos_token_id=2, bos_token_id=1)
  assert configs.read_end_of_text(fields, dict(eos_token_id=[[1], 999])) == 2
  assert 'name [[1], 999] as eos_token_id, outside its vocab' in caplog.text
  assert configs.read_end_of_text(fields, dict(eos_token_id=[2, 3])) == [2, 3]
  assert configs.read_begin_of_text(fields) == 1
  fields = LLAMA | dict(bos_token_id=None)
  assert configs.read_begin_of_text(fields) is None
  assert configs.read_begin_of_text(fields, dict(bos_token_id=3)) == 3
  config = models.LlamaConfig(270, 1, 2, 16, 48, 32, n_kv_heads=1)
  written = configs.write_config(config, 'float32', [2, 3], 1)
  assert (written['bos_token_id'], written['eos_token_id']) == (1, [2, 3])


def test_an_exported_tokenizer_names_its_tokens(llama, tmp_path):
  (tmp_path / 'export').mkdir()
  paths = data.export_tokenizer(tmp_path / 'export' / 'tokenizer.json', llama)
  settings = json.loads(paths[1].read_text())
  assert (settings['bos_token'], settings['eos_token']) == ('<s>', '</s>')
  again = data.open_tokenizer(tmp_path / 'export')
  assert special_tokens.special_of(again) == SpecialTokens(BEGIN, True, (END,))
  assert paths == data.tokenizer_paths(tmp_path / 'export')
