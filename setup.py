"""Packaging: all metadata is here, the build system in pyproject.toml."""

import pathlib
import re

from setuptools import find_packages
from setuptools import setup

_ROOT = pathlib.Path(__file__).parent


def _value(name: str, file: str) -> str:
  """Returns a constant of a module, without importing it."""
  return re.search(rf"^{name} = '(.*)'", (_ROOT / file).read_text(), re.M)[1]


_VERSION = _value('__version__', 'spdf_jax/__init__.py')
_REPOSITORY = _value('REPOSITORY', 'spdf_jax/extras.py')
_README = (_ROOT / 'README.md').read_text()
_URLS = {}
if _REPOSITORY:
  _URLS = {
      'Repository': _REPOSITORY,
      'Changelog': f'{_REPOSITORY}/blob/main/CHANGELOG.md',
  }
  # Package indexes show README without the files that it links.
  _README = re.sub(
      r'(!\[.+?\]\()(?=\w+/)', rf'\1{_REPOSITORY}/raw/main/', _README
  )
  _README = re.sub(
      r'\]\((?!\w+:)(?=\w+[/.])', f']({_REPOSITORY}/blob/main/', _README
  )

_CLUSTER = ['ray>=2.40']
_DATA = ['tokenizers>=0.21']
_EVAL = ['nltk>=3.9', 'sacrebleu>=2.4']
_HARNESS = ['lm_eval>=0.4.13']
_HF = ['ml_dtypes>=0.5', 'safetensors>=0.4.3']
_LOG = ['tensorboardX>=2.6', 'wandb>=0.17']
_VIZ = ['matplotlib>=3.8']
_PREPARE = [
    *_DATA, 'aiohttp>=3.9', 'datasets>=4.0', 'pyarrow>=15',
    'sentencepiece>=0.2', 'zstandard>=0.22',
]
_QUICKSTART = [*_DATA, *_EVAL, *_VIZ]
_NOTEBOOKS = [*_QUICKSTART, 'equinox>=0.13', 'ipykernel>=6.29', 'nbconvert>=7']
_DOCS = [
    *_NOTEBOOKS, 'myst-nb>=1.3', 'sphinx>=8.2',
    'sphinx-book-theme>=1.1', 'sphinx-copybutton>=0.5', 'sphinx-design>=0.6',
]

setup(
    name='spdf_jax',
    version=_VERSION,
    description=(
        'Sparse pre-training and dense fine-tuning of language models in JAX: '
        'sparsity as optax transformations.'
    ),
    long_description=_README,
    long_description_content_type='text/markdown',
    author='The spdf_jax authors',
    project_urls=_URLS,
    license_expression='Apache-2.0',
    license_files=['LICENSE'],
    keywords='jax flax optax sparsity pruning language-models',
    classifiers=[
        'Development Status :: 3 - Alpha',
        'Intended Audience :: Developers',
        'Intended Audience :: Science/Research',
        'Operating System :: POSIX :: Linux',
        'Programming Language :: Python :: 3',
        'Programming Language :: Python :: 3.11',
        'Programming Language :: Python :: 3.12',
        'Programming Language :: Python :: 3.13',
        'Topic :: Scientific/Engineering :: Artificial Intelligence',
        'Typing :: Typed',
    ],
    packages=find_packages(include=['spdf_jax', 'spdf_jax.*']),
    include_package_data=False,
    package_data={
        'spdf_jax': ['py.typed'],
        'spdf_jax.accelerator.native': ['csrc/*'],
    },
    python_requires='>=3.11',
    install_requires=[
        'absl-py',
        'flax>=0.12',
        'jax>=0.10.2',
        'ml-collections>=1.1',
        'numpy>=2.0',
        'optax>=0.2.8',
        'orbax-checkpoint>=0.12',
    ],
    extras_require={
        'cluster': _CLUSTER,
        'data': _DATA,
        'docs': _DOCS,
        'eval': _EVAL,
        'harness': _HARNESS,
        'hf': _HF,
        'log': _LOG,
        'prepare': _PREPARE,
        'viz': _VIZ,
        'quickstart': _QUICKSTART,
        'notebooks': _NOTEBOOKS,
        'dev': [
            *_QUICKSTART,
            *_HF,
            *_PREPARE,
            'equinox>=0.13',
            'tensorboardX',
            'flatbuffers',
            'hypothesis',
            'jupytext',
            'mypy',
            'pytest',
            'pytest-xdist',
            'ruff',
        ],
    },
)
