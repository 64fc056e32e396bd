"""Released checkpoints: the authors' inference code gives our logits.

`SPDF_CLONES` names a folder with a clone of openai/circuit_sparsity.
"""

import json
import pathlib
import sys

import jax
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[2]
if not (ROOT / 'experiments').is_dir():
  pytest.skip('needs the checkout', allow_module_level=True)

from experiments.weight_sparse import model as models  # noqa: E402
from experiments.weight_sparse import released  # noqa: E402
from tests.real_data import clone_path  # noqa: E402

torch = pytest.importorskip('torch', reason='torch is not installed')
for library in ('blobfile', 'tiktoken'):
  pytest.importorskip(library, reason=f'{library} is not installed')

pytestmark = pytest.mark.slow
SIZES = dict(vocab_size=40, d_model=64, max_length=24, n_layers=3)
TOKENS = np.random.default_rng(0).integers(40, size=(3, 24), dtype=np.int32)
OPTIONS = {
    'recipe': {},
    'tied, positions': dict(tied=True, positions=True, bigrams=False),
    'plain': dict(
        activation='relu', biases=False, sink=False, kept_activations=1.0,
        head_size=32, d_ff=96,
    ),
    'some locations': dict(
        kept_activations=0.4, locations=('attn_q', 'mlp_neuron')
    ),
}


@pytest.fixture
def gpt(monkeypatch):
  """The authors' module of inference."""
  folder = clone_path('circuit_sparsity')
  monkeypatch.syspath_prepend(folder)
  monkeypatch.setenv('TIKTOKEN_CACHE_DIR', '')  # Files of one name differ.
  before = {*sys.modules}
  from circuit_sparsity.inference import gpt
  yield gpt
  for name in {*sys.modules} - before:
    if name.startswith('circuit_sparsity'):
      del sys.modules[name]


def logits_of(module):
  with torch.no_grad():
    return module(torch.tensor(TOKENS, dtype=torch.long))[0].numpy()


@pytest.mark.parametrize('name', OPTIONS)
def test_their_code_gives_our_logits_on_exported_weights(name, gpt, tmp_path):
  model, where = models.make_model(**SIZES | OPTIONS[name])
  shapes = jax.eval_shape(model.init, jax.random.key(0), TOKENS)['params']
  rng = np.random.default_rng(1)
  params = jax.tree.map(
      lambda x: (rng.normal(0, 0.4, x.shape) * (rng.random(x.shape) < 0.5))
      .astype(np.float32), shapes,
  )
  released.write(tmp_path, model, params)
  theirs = gpt.load_model(str(tmp_path), flash=True, cuda=False)
  names = set(torch.load(tmp_path / released.WEIGHTS, weights_only=True))
  assert names == set(theirs.state_dict())
  ours = model.apply({'params': params}, TOKENS)
  assert np.abs(ours).max() > 0.5
  np.testing.assert_allclose(ours, logits_of(theirs), atol=1e-5, rtol=1e-5)
  again, read = released.read(tmp_path)
  assert again == model
  jax.tree.map(np.testing.assert_array_equal, params, read)


@pytest.mark.parametrize('change', [
    {}, dict(tied_unembed=True, bias=False), dict(d_head=8, d_mlp=48),
    dict(enable_bigram_table=False, afrac=None),
])
def test_a_random_model_of_theirs_is_read(change, gpt, tmp_path):
  fields = dict(
      block_size=24, vocab_size=40, n_layer=2, n_head=4, d_model=64,
      rms_norm=True, tied_unembed=False, sink=True, afrac=0.25,
      afrac_loctypes=','.join(models.LOCATIONS), enable_bigram_table=True,
      learnable_bigram_table=True, grad_checkpointing=False,
  ) | change
  torch.manual_seed(0)
  theirs = gpt.GPT(gpt.GPTConfig(**fields)).eval()
  with torch.no_grad():
    for x in (*theirs.parameters(), theirs.final_logits_bias):
      x.add_(0.2 * torch.randn(x.shape))
  (tmp_path / released.CONFIG).write_text(json.dumps(fields))
  torch.save(theirs.state_dict(), tmp_path / released.WEIGHTS)
  model, params = released.read(tmp_path)
  np.testing.assert_allclose(
      model.apply({'params': params}, TOKENS), logits_of(theirs),
      atol=1e-5, rtol=1e-5,
  )


@pytest.mark.parametrize('fields, message', [
    (dict(rms_norm=False), 'has rms_norm False'),
    (dict(d_pos_emb=8), 'has d_pos_emb 8'),
    (dict(n_layer=4), r"h.3.attn.c_attn.weight' is missing"),
    (dict(d_mlp=12), 'has shape'),
])
def test_models_with_other_features_are_refused(fields, message, tmp_path):
  model, _ = models.make_model(**SIZES)
  params = model.init(jax.random.key(0), TOKENS)['params']
  released.write(tmp_path, model, params)
  path = tmp_path / released.CONFIG
  path.write_text(json.dumps(json.loads(path.read_text()) | fields))
  with pytest.raises(ValueError, match=message):
    released.read(tmp_path)
