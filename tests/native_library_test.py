"""The kernels are built once, rebuilt if damaged, and optional.

Every test asks a child process, as a process remembers what it has found.
"""

import os
import platform
import shutil
import subprocess
import sys
import textwrap

import pytest

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(
        platform.system() != 'Linux', reason='the kernels are for Linux'
    ),
]
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ('g++', 'clang++', 'c++'))),
    reason='there is no C++ compiler here',
)

BUILD = textwrap.dedent('''
    from spdf_jax.accelerator.native import library
    assert library.is_available() and library.kernels()
    print(library.build())
''')
IS_AVAILABLE = textwrap.dedent('''
    from spdf_jax.accelerator import native
    print(native.is_available(), native.is_available())
''')
MULTIPLY = textwrap.dedent('''
    import jax
    import numpy as np
    from spdf_jax.accelerator import native
    from spdf_jax.accelerator import sparse_matmul

    print(native.is_available())
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(9, 40)), rng.normal(size=(40, 30))
    x, w, mask = np.float32(x), np.float32(w), rng.random(w.shape) < 0.3
    for lowering in 'reference', 'native':
      loss = lambda x, w: (
          sparse_matmul(x, w, mask, lowering=lowering) ** 2
      ).sum()
      results = jax.value_and_grad(loss, (0, 1))(x, w)
      print(*(np.asarray(a).tobytes().hex() for a in jax.tree.leaves(results)))
''')


BFLOAT16 = textwrap.dedent('''
    import jax.numpy as jnp
    from spdf_jax.accelerator import native
    from spdf_jax.accelerator import sparse_matmul

    native.is_available()
    print(native.is_available('bfloat16'))
    x, w = jnp.ones((2, 40), 'bfloat16'), jnp.ones((40, 3), 'bfloat16')
    for lowering in 'reference', 'native':
      print(sparse_matmul(x, w, w > 0, lowering=lowering).tolist())
''')


def start(code, cache, **changes):
  """Starts a child with a cache of its own."""
  env = os.environ | {
      'XDG_CACHE_HOME': cache,
      'JAX_PLATFORMS': 'cpu',
      # The package that is tested, wherever it lies.
      'PYTHONPATH': os.pathsep.join(path for path in sys.path if path),
  }
  for name in ('CXX', 'SPDF_NATIVE', 'SPDF_NATIVE_KERNELS'):
    env.pop(name, None)
  return subprocess.Popen(
      [sys.executable, '-c', code],
      env={k: str(v) for k, v in (env | changes).items()},
      stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
  )


def finish(child):
  """Returns what a child wrote to both streams, and its exit status."""
  out, err = child.communicate(timeout=100)
  return out, err, child.returncode


@pytest.fixture
def run(tmp_path):
  """Runs a child whose cache is in the test's folder."""
  return lambda code, cache=tmp_path / 'cache', **changes: finish(
      start(code, cache, **changes)
  )


@pytest.fixture
def no_compiler(tmp_path):
  (tmp_path / 'bin').mkdir()
  return dict(PATH=tmp_path / 'bin')


@pytest.fixture(scope='module')
def quick_compiler(tmp_path_factory):
  """A compiler that does not optimise: no kernel is run here."""
  found = next(filter(None, map(shutil.which, ('g++', 'clang++', 'c++'))))
  return write_script(
      tmp_path_factory.mktemp('bin') / 'quick', f'exec {found} "$@" -O0'
  )


@pytest.fixture(scope='module')
def warm(quick_compiler, tmp_path_factory):
  """A cache that two processes have filled at the same time."""
  cache = tmp_path_factory.mktemp('warm')
  wish = dict(CXX=quick_compiler, SPDF_NATIVE='require')
  children = [start(BUILD, cache, **wish) for _ in range(2)]
  return cache, [finish(child) for child in children]


def write_script(path, body):
  path.write_text(f'#!/bin/sh\n{body}\n')
  path.chmod(0o755)
  return path


def only_library(cache):
  (path,) = cache.glob('spdf_jax/*/libspdf.so')
  return path


@needs_compiler
def test_two_processes_that_build_at_once_both_succeed(warm):
  cache, results = warm
  assert [code for *_, code in results] == [0, 0], results
  library = only_library(cache)
  assert {out.strip() for out, *_ in results} == {str(library)}
  # Nothing of the work is left.
  assert sorted(path.name for path in library.parent.iterdir()) == [
      'libspdf.so', 'libspdf.so.sha256'
  ]


@needs_compiler
def test_what_was_built_is_found_again(warm, quick_compiler, run):
  cache, _ = warm
  library = only_library(cache)
  before = library.stat().st_mtime_ns, library.stat().st_ino
  out, err, code = run(BUILD, cache, CXX=quick_compiler)
  assert (out.strip(), code) == (str(library), 0), err
  assert (library.stat().st_mtime_ns, library.stat().st_ino) == before


@needs_compiler
def test_a_truncated_library_is_built_anew(
    warm, quick_compiler, run, tmp_path
):
  shutil.copytree(warm[0], tmp_path / 'cache')
  library = only_library(tmp_path / 'cache')
  whole = library.read_bytes()
  library.write_bytes(whole[:len(whole) // 2])
  out, err, code = run(BUILD, CXX=quick_compiler)
  assert (out.strip(), code) == (str(library), 0), err
  assert len(library.read_bytes()) == len(whole)


@needs_compiler
def test_a_library_that_others_can_write_to_is_not_loaded(
    warm, quick_compiler, run, tmp_path
):
  shutil.copytree(warm[0], tmp_path / 'cache')
  library = only_library(tmp_path / 'cache')
  library.parent.chmod(0o777)
  out, err, code = run(IS_AVAILABLE, CXX=quick_compiler)
  assert (out, code) == ('False False\n', 0), err
  (warning,) = err.splitlines()
  assert f'native kernels are not used: {library.parent} has mode' in warning


def test_not_wished_for_it_is_not_built(run, tmp_path):
  out, err, code = run(IS_AVAILABLE, SPDF_NATIVE=0)
  assert (out, code) == ('False False\n', 0), err
  assert 'native kernels' not in err  # What was wished for needs no warning.
  assert not (tmp_path / 'cache').exists()


@pytest.mark.parametrize('compiler', ['g++', '/no/cxx'])
def test_required_without_a_compiler_it_is_an_error(compiler, run, no_compiler):
  changes = no_compiler if compiler == 'g++' else dict(CXX=compiler)
  _, err, code = run(IS_AVAILABLE, SPDF_NATIVE='require', **changes)
  assert code == 1
  assert err.splitlines()[-1] == (
      'spdf_jax.accelerator.native.library.Unavailable: native kernels are '
      f'not used: there is no C++ compiler ({compiler}) on PATH; install one.'
  )


def test_without_a_compiler_it_warns_once_and_uses_the_reference(
    run, no_compiler
):
  out, err, code = run(MULTIPLY, **no_compiler)
  available, reference, native = out.splitlines()
  assert (available, code) == ('False', 0), err
  assert native == reference
  (warning,) = [line for line in err.splitlines() if 'native' in line]
  assert 'there is no C++ compiler (g++) on PATH' in warning
  assert 'Traceback' not in err


@pytest.mark.parametrize('name, value, message', [
    ('SPDF_NATIVE', 'maybe', "SPDF_NATIVE is 'maybe'; set it to 0, 1 or req"),
    ('SPDF_NATIVE_KERNELS', 'sse', "SPDF_NATIVE_KERNELS is 'sse'; unset it, "),
])
def test_other_values_of_variables_are_refused(name, value, message, run):
  code = 'from spdf_jax.accelerator import native; native.is_available()'
  _, err, status = run(
      f'{code}; native.kernels()', **{name: value}
  )
  assert status == 1 and message in err.splitlines()[-1]


def test_a_compiler_that_fails_is_a_reason_in_one_line(run, tmp_path):
  broken = write_script(
      tmp_path / 'broken', 'echo "in file a" >&2; echo "error: no" >&2; exit 1'
  )
  out, err, code = run(IS_AVAILABLE, CXX=broken)
  assert (out, code) == ('False False\n', 0), err
  (warning,) = err.splitlines()
  assert warning.endswith(
      f'native kernels are not used: {broken} failed: error: no'
  )
  assert not list((tmp_path / 'cache').glob('spdf_jax/*/*'))


def test_a_cache_that_cannot_be_written_is_a_reason(run, tmp_path):
  (tmp_path / 'cache').write_text('a file in the way')
  script = write_script(tmp_path / 'cxx', 'exit 0')
  out, err, code = run(IS_AVAILABLE, CXX=script)
  assert (out, code) == ('False False\n', 0), err
  (warning,) = err.splitlines()
  assert 'native kernels are not used: ' in warning
  assert str(tmp_path / 'cache') in warning
  assert 'cannot be written' in warning


@needs_compiler
def test_without_kernels_of_bfloat16_it_warns_once_and_uses_the_reference(
    warm, quick_compiler, run
):
  wish = dict(CXX=quick_compiler, SPDF_NATIVE_KERNELS='portable')
  out, err, code = run(BFLOAT16, warm[0], **wish)
  available, reference, native = out.splitlines()
  assert (available, code) == ('False', 0), err
  assert native == reference
  (warning,) = [line for line in err.splitlines() if 'native' in line]
  assert 'bfloat16 are not used: they need a processor with AVX-512' in warning
  _, err, code = run(BFLOAT16, warm[0], SPDF_NATIVE='require', **wish)
  assert code == 1
  assert 'Unavailable: native kernels of bfloat16 are not used' in err


@needs_compiler
def test_a_compiler_that_knows_no_bfloat16_builds_the_other_kernels(
    quick_compiler, run, tmp_path
):
  old = write_script(tmp_path / 'old', (
      'case "$*" in *-mavx512bf16*) echo "error: no -mavx512bf16" >&2; exit 1;;'
      f' esac; exec {quick_compiler} "$@"'
  ))
  out, err, code = run(BUILD + BFLOAT16, CXX=old, SPDF_NATIVE=1)
  assert (out.splitlines()[1], code) == ('False', 0), err
  assert 'a compiler that supports it' in err


def test_a_benchmark_of_kernels_says_that_there_are_none(run, no_compiler):
  code = (
      'import sys; sys.argv = ["benchmark", "--suite=matmul"]\n'
      'from absl import app; from experiments import benchmark\n'
      'app.run(benchmark.main)'
  )
  _, err, status = run(code, **no_compiler)
  assert status == 1
  assert 'there is no C++ compiler' in err
  assert 'Traceback' not in err
