"""Models keep ids, logits and texts on the way to transformers and back."""

import functools
import json

import numpy as np
import pytest

from experiments import convert
from experiments.scores import language_models
from spdf_jax import data
from spdf_jax import evaluation
from spdf_jax import interop
from spdf_jax import models
from spdf_jax.data import special_tokens
from tests.hf_models import make_params

pytestmark = pytest.mark.slow
torch = pytest.importorskip('torch', reason='torch is not installed')
transformers = pytest.importorskip(
    'transformers', reason='transformers is not installed'
)
tokenizers = pytest.importorskip('tokenizers')

LENGTH, NEW = 96, 12
TEXTS = [
    'to be or not', 'é ñ ß', '漢字 かな 한국', 'العربية עברית', '😀🦜👩‍👩‍👧',
    'e\u0301 a\u0308 \u0e33', '𝒳 𐍈', ' two  spaces\t\n\r\n',
    '\u2028\ufeff\ufffd', '42 <s> </s>', 'a <|eot|> be',
]
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r'| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
)


def byte_level(size, special, *, words=None):
  """A byte-level BPE of `tokenizers` that learned the texts."""
  model = tokenizers.Tokenizer(tokenizers.models.BPE())
  level = tokenizers.pre_tokenizers.ByteLevel(
      add_prefix_space=False, use_regex=words is None
  )
  model.pre_tokenizer = level if words is None else (
      tokenizers.pre_tokenizers.Sequence([
          tokenizers.pre_tokenizers.Split(tokenizers.Regex(words), 'isolated'),
          level,
      ])
  )
  model.decoder = tokenizers.decoders.ByteLevel()
  model.train_from_iterator(TEXTS * 3, tokenizers.trainers.BpeTrainer(
      vocab_size=size, special_tokens=special, show_progress=False,
      initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
  ))
  return model


def gpt2_tokenizer(folder):
  data.export_tokenizer(
      folder / 'tokenizer.json', data.train_bpe(TEXTS * 3, 290)
  )


def llama_tokenizer(folder):
  """As Llama 3: byte-level, with a beginning that a template adds."""
  model = byte_level(290, ['<|begin|>', '<|end|>', '<|eot|>'])
  model.post_processor = tokenizers.processors.TemplateProcessing(
      single='<|begin|> $A', special_tokens=[('<|begin|>', 0)]
  )
  write(folder, model, tokenizer_config=dict(
      tokenizer_class='PreTrainedTokenizerFast', bos_token='<|begin|>',
      # Only this file names the unknown token.
      eos_token='<|end|>', unk_token='be',
  ), generation_config=dict(
      bos_token_id=0, eos_token_id=[1, 2], temperature=0.6, top_p=0.9,
      do_sample=True,
  ))


def mistral_tokenizer(folder):
  """As Mistral 1 and Llama 2: pieces, with bytes for other characters."""
  pieces = ['<unk>', '<s>', '</s>', *(f'<0x{i:02X}>' for i in range(256))]
  pieces += ['▁', *'abcdefghijklmnoprstuvwxyz', 'to', '▁to', 'be', '▁be']
  vocabulary = {piece: i for i, piece in enumerate(pieces)}
  model = tokenizers.Tokenizer(tokenizers.models.BPE(
      vocabulary, [('t', 'o'), ('▁', 'to'), ('b', 'e'), ('▁', 'be')],
      unk_token='<unk>', fuse_unk=True, byte_fallback=True,
  ))
  model.normalizer = tokenizers.normalizers.Sequence([
      tokenizers.normalizers.Prepend('▁'),
      tokenizers.normalizers.Replace(' ', '▁'),
  ])
  model.decoder = tokenizers.decoders.Sequence([
      tokenizers.decoders.Replace('▁', ' '), tokenizers.decoders.ByteFallback(),
      tokenizers.decoders.Fuse(), tokenizers.decoders.Strip(' ', 1, 0),
  ])
  model.add_special_tokens(['<unk>', '<s>', '</s>'])
  model.post_processor = tokenizers.processors.TemplateProcessing(
      single='<s> $A', special_tokens=[('<s>', 1)]
  )
  write(folder, model, tokenizer_config=dict(
      tokenizer_class='PreTrainedTokenizerFast', bos_token='<s>',
      eos_token='</s>', unk_token='<unk>',
  ))


def qwen_tokenizer(folder):
  """As Qwen2 and Qwen3: composed characters, no beginning, a chat template."""
  model = byte_level(
      290, ['<|endoftext|>', '<|im_start|>', '<|im_end|>'], words=QWEN_WORDS
  )
  model.normalizer = tokenizers.normalizers.NFC()
  write(folder, model, tokenizer_config=dict(
      tokenizer_class='Qwen2Tokenizer', bos_token=None, eos_token='<|im_end|>',
      pad_token='<|endoftext|>', chat_template='{{ messages }}',
  ), generation_config=dict(
      eos_token_id=[2, 0], pad_token_id=0, top_k=20, do_sample=True,
  ))


def write(folder, model, **files):
  model.save(str(folder / 'tokenizer.json'))
  for name, fields in files.items():
    (folder / f'{name}.json').write_text(json.dumps(fields))


llama = functools.partial(
    models.LlamaConfig, 290, 2, 4, 32, 48, LENGTH, n_kv_heads=2, norm_eps=1e-6
)
FAMILIES = {
    'gpt2': (gpt2_tokenizer, models.GPTConfig(290, 2, 4, 32, 128, LENGTH)),
    'llama': (llama_tokenizer, llama()),
    'mistral': (mistral_tokenizer, llama()),
    'qwen2': (qwen_tokenizer, llama(qkv_bias=True, tied=True)),
    'qwen3': (qwen_tokenizer, llama(qk_norm=True, head_dim=12)),
}


def our_answers(folder):
  """Ids, logits and greedy texts of a directory, by our code."""
  model = language_models.open_hf(str(folder))
  tokenizer = model.tokenizer
  ids = [
      special_tokens.begun(tokenizer, each)
      for each in tokenizer.encode_batch(TEXTS)
  ]
  apply = model.subject.apply_fn
  logits = [
      np.asarray(apply(model.params, np.array([each])))[0] for each in ids
  ]
  texts = evaluation.generate(
      evaluation.CachedModel(model.module), model.params, ids,
      max_new_tokens=NEW, batch_size=4, length=LENGTH,
      end_of_text=special_tokens.special_of(tokenizer).ends,
  )
  return ids, logits, [tokenizer.decode(each) for each in texts]


def their_answers(model, tokenizer):
  """The same by transformers, one text at a time."""
  ids = [tokenizer(text).input_ids for text in TEXTS]
  logits, texts = [], []
  for each in ids:
    given = torch.tensor([each])
    with torch.no_grad():
      logits.append(model(given).logits[0].numpy())
      made = model.generate(
          given, attention_mask=torch.ones_like(given), do_sample=False,
          max_new_tokens=NEW, pad_token_id=0, temperature=1.0, top_p=1.0,
          top_k=None,
      )[0, len(each):]
    texts.append(tokenizer.decode(made, skip_special_tokens=True))
  return ids, logits, texts


def assert_same_answers(ours, want):
  assert ours[0] == want[0]
  for x, y in zip(ours[1], want[1]):
    assert np.abs(x - y).max() <= 1e-5 * max(np.abs(y).max(), 1)
  assert ours[2] == want[2]


@pytest.mark.parametrize('name', FAMILIES)
def test_three_round_trips_keep_ids_logits_and_texts(name, tmp_path):
  write_tokenizer, config = FAMILIES[name]
  source = tmp_path / 'tokenizer'
  source.mkdir()
  write_tokenizer(source)
  folder = tmp_path / 'ours'
  params = make_params(config)
  interop.save_hf(folder, config, params)
  if name == 'mistral':  # save_hf writes a Mistral as a Llama.
    fields = json.loads((folder / 'config.json').read_text())
    fields |= dict(model_type='mistral', architectures=['MistralForCausalLM'])
    (folder / 'config.json').write_text(json.dumps(fields))
  for path in source.iterdir():
    (folder / path.name).write_bytes(path.read_bytes())
  first = our_answers(folder)
  assert any(first[2])
  stated = folder / 'generation_config.json'
  generation = json.loads(stated.read_text()) if stated.exists() else {}
  for trip in range(3):
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert_same_answers(first, their_answers(theirs, tokenizer))
    away = tmp_path / f'theirs_{trip}'
    theirs.save_pretrained(away)
    tokenizer.save_pretrained(away)
    folder = tmp_path / f'ours_{trip}'
    if trip == 1:  # By way of a workdir.
      convert.import_model(away, tmp_path / 'run', scan_layers=True)
      convert.export_model(
          str(tmp_path / 'run'), folder, format='dense', dtype='float32',
          vocab_size=None,
      )
    else:
      convert.rewrite_model(
          away, folder, format='dense', dtype='float32', vocab_size=None
      )
    assert_same_answers(our_answers(folder), first)
    settings = json.loads((folder / 'generation_config.json').read_text())
    assert generation.items() <= settings.items()
    generation = settings
  assert tokenizer.chat_template == (
      '{{ messages }}' if name.startswith('qwen') else None
  )
