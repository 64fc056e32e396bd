"""Commands refuse flags in one sentence, before anything is written."""

import pytest

from tests import command
from tests.quickstart_runs import ROOT

CONFIG = f'{ROOT}/configs/quickstart.py'


@pytest.mark.parametrize('words, message', [
    ('benchmark --suite=trainstep',
     "suite 'trainstep' is unknown; did you mean 'train_step'"),
    ('convert --model=none', 'give --to or --to_hf.'),
    ('convert --model=none --to=a --to_hf=b', 'give --to or --to_hf.'),
    ('convert --model=none --to=a',
     "model is 'none', which is no Hugging Face directory, as --to needs"),
    ('convert --model=none --to_hf=a', "'none' names no checkpoint: "),
    ('convert --model=a --to=b --vocab_size=9',
     'vocab_size is given, which needs --to_hf; add it, or leave'),
    ('convert --model=a --to_hf=b --scan_layers',
     'scan_layers is given, which needs --to; add it, or leave'),
    ('convert --model=a --to_hf=b --allow_non_finite',
     "allow_non_finite is given, and model is 'a', a run; leave"),
    ('convert --model=none --to_hf=a --format=compact --check',
     "format is 'compact', which transformers cannot read; leave --check"),
    ('evaluate --hf=a --tasks=validation --output=b',
     'give a name that ends in .json'),
    ('evaluate --workdir=a',
     'set --tasks to validation, cerebras_gpt, open_llm, python-docstrings, or '
     'NAME=PATH with the path of its files, where NAME is one of lambada, '),
    ('flops', 'give --table or --config'),
    ('flops --table=variabel',
     "table 'variabel' is unknown; did you mean 'var"),
    ('flops --table=spdf --trace', '--trace needs --config'),
    ('flops --config=CONFIG --output=a', '--output needs --table'),
    ('one_shot --model=a --workdir=b --sparsities=0.5,1',
     "sparsities is '0.5,1'; give fractions of zeros above 0 and below 1"),
    ('one_shot --model=a --workdir=b --sparsities=few', "sparsities is 'few'"),
    ('one_shot --model=a --workdir=b --sparsities=', "sparsities is ''"),
    ('plan --model=gpt3-xl --tokens=nan --flops=1e20',
     'tokens is nan; give the number of tokens'),
    ('prepare --tokenizer=bytes', 'give --input'),
    ('prepare --task=e2f --input=a', "task 'e2f' is unknown; did you mean"),
    ('prepare --input=nowhere --tokenizer=bytes --output=a',
     "input='nowhere' does not exist"),
    ('prepare --input=a --tokenizer=bytes --output=b --dry_run', 'for --task'),
    ('rates --study=coordinates --output=a', 'give --config with --study=coor'),
    ('rates --study=densities --output=a --config=CONFIG',
     'give --config with --study=coor'),
    ('report --runs=runs/a,runs/a/ --output=b',
     'runs=runs/a,runs/a repeats one; give each once.'),
    ('simulate --config=CONFIG --systems=0', '--systems=0'),
    ('simulate --figure=roofline', 'need --config'),
    ('simulate --audit --trace=a.json', 'need --config'),
    ('generate --model=none --seed=-1', '--seed=-1: -1 is not'),
    (f'generate --model=none --seed={2**63}', f'--seed={2**63}: {2**63} is'),
    ('sweep --config=CONFIG --workdir=a --grid=seed=1,2 --index=1 '
     '--executor=ray',
     'omit --executor'),
])
def test_flags_are_refused_in_one_sentence_and_nothing_is_written(
    words, message, tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  done = command.run(*words.replace('CONFIG', CONFIG).split())
  assert done.status == 1 and not done.output
  assert len(done.log.splitlines()) == 1 and message in done.log
  assert not list(tmp_path.iterdir())
