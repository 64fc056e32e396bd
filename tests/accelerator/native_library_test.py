"""The kernels are built once, rebuilt if damaged, and optional.

A process remembers what it has loaded, so child processes load libraries. What
only builds them calls `build`, with scripts in place of compilers.
"""

import os
import platform
import shutil
import subprocess
import sys
import textwrap
import time

import pytest

from spdf_jax.accelerator import native
from spdf_jax.accelerator.native import library
from tests.refusals import refuse

pytestmark = pytest.mark.skipif(
    platform.system() != 'Linux', reason='the kernels are for Linux'
)


def write_script(path, body):
  path.write_text(f'#!/bin/sh\n{body}\n')
  path.chmod(0o755)
  return path


@pytest.fixture
def use(tmp_path, monkeypatch):
  """Sets the compiler, and a cache in the folder of the test."""
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  before = os.umask(0)  # Caches are private under any umask.
  yield lambda body: monkeypatch.setenv(
      'CXX', str(write_script(tmp_path / 'compiler', body))
  )
  os.umask(before)


WRITE = 'while [ $# -gt 1 ]; do shift; done; [ -d "${1%/*}" ] && echo code > $1'


@pytest.fixture
def built(use, tmp_path):
  """Returns the path of a library that is built in an instant."""
  use(f'echo "$@" >> {tmp_path}/calls; {WRITE}')
  path = library.build()
  (tmp_path / 'calls').unlink()
  return path


def refuse_to_build(message):
  refuse(message, library.build, error=library.Unavailable)


def test_caches_and_libraries_are_private_and_used_again(built, tmp_path):
  places = [built, built.parent, built.parent.parent, tmp_path / 'cache']
  assert [path.stat().st_mode & 0o777 for path in places] == [0o700] * 4
  assert library.build() == built
  assert (tmp_path / 'calls').read_text() == '--version\n'


def test_a_damaged_library_is_built_anew(built):
  whole = built.read_bytes()
  built.write_bytes(whole[:2])
  assert library.build() == built and built.read_bytes() == whole


@pytest.mark.parametrize('planted, added', [('folder', 0o020), ('file', 0o002)])
def test_a_library_that_others_can_write_to_is_refused(built, planted, added):
  path = built.parent if planted == 'folder' else built
  path.chmod(0o700 | added)
  refuse_to_build(f'{path} has mode 7.*chmod')


def test_a_library_of_another_user_is_refused(built, monkeypatch):
  monkeypatch.setattr(os, 'geteuid', lambda: os.getuid() + 1)
  refuse_to_build(f'{built.parent} belongs to t')


def test_folders_of_killed_builds_are_removed_after_a_day(built):
  old, new = built.parent / 'tmpold', built.parent / 'tmpnew'
  for folder in (old, new):
    folder.mkdir()
    (folder / 'handlers.o').write_text('half')
  two_days_ago = time.time() - 2 * 24 * 60 * 60
  os.utime(old, (two_days_ago, two_days_ago))
  assert library.build() == built
  assert new.exists() and not old.exists()


def test_a_failing_compiler_is_reported_in_one_line(use, tmp_path):
  use('echo "in file a" >&2; echo "error: no" >&2; exit 1')
  refuse_to_build(r'^compiler \S+ failed: error: no; .*\.$')
  assert not list((tmp_path / 'cache').glob('spdf_jax/*/*'))


@pytest.mark.skipif(
    'amx' not in library.buildable(), reason='all kernels are needed here'
)
@pytest.mark.parametrize('checked, says, is_refused', [
    ('exit 0', 'error: killed', False),
    ('exit 1', 'error: no such flag', True),
    ('exit 0', 'x.s: Assembler messages:', True),
])
def test_kernels_are_left_out_only_if_the_compiler_refuses_them(
    checked, says, is_refused, use, tmp_path
):
  fails = f'*-fsyntax-only*) {checked};; *-mamx*) echo "{says}" >&2; exit 1;;'
  use(f'case "$*" in {fails} esac; {WRITE}')
  if is_refused:
    assert library.build().exists()
  else:
    refuse_to_build(f'failed: {says}; ')
    assert not list((tmp_path / 'cache').glob('spdf_jax/*/*'))


def test_a_cache_that_cannot_be_written_is_reported(use, tmp_path):
  use('exit 0')
  (tmp_path / 'cache').write_text('a file in the way')
  refuse_to_build(f'{tmp_path}/cache.* cannot be written')


def test_unknown_values_of_spdf_native_are_refused(monkeypatch):
  monkeypatch.setenv('SPDF_NATIVE', 'maybe')
  refuse("SPDF_NATIVE is 'maybe'; set it to 0, ", native.is_available)


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
    import jax.numpy as jnp
    import numpy as np
    from spdf_jax.accelerator import native
    from spdf_jax.accelerator import sparse_matmul

    native.is_available()
    print(native.is_available(DTYPE))
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(9, 40)), rng.normal(size=(40, 30))
    x, w, mask = jnp.array(x, DTYPE), jnp.array(w, DTYPE), w > 0.5
    for lowering in 'reference', 'native':
      loss = lambda x, w: (
          sparse_matmul(x, w, mask, lowering=lowering) ** 2
      ).sum()
      results = jax.value_and_grad(loss, (0, 1))(x, w)
      print(*(np.asarray(a).tobytes().hex() for a in jax.tree.leaves(results)))
''')


def start(code, cache, **changes):
  """Starts a child with a cache of its own."""
  env = os.environ | {
      'XDG_CACHE_HOME': cache,
      'JAX_PLATFORMS': 'cpu',
      # The child imports the same package as this process.
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


def run(code, cache, **changes):
  return finish(start(code, cache, **changes))


@pytest.fixture
def no_compiler(tmp_path):
  (tmp_path / 'bin').mkdir()
  return dict(PATH=tmp_path / 'bin')


@pytest.fixture(scope='module')
def quick_compiler(tmp_path_factory):
  """Returns a compiler that does not optimize, and compiles nothing twice."""
  compiler = next(filter(None, map(shutil.which, ('g++', 'clang++', 'c++'))))
  folder = tmp_path_factory.mktemp('bin')
  return write_script(folder / 'quick', textwrap.dedent(f'''
      case "$*" in *-o*) ;; *) exec {compiler} "$@";; esac
      for a; do made=$a; done
      kept={folder}/$(for a; do echo "${{a##*/}}"; done | cksum | tr ' ' .)
      if [ ! -e $kept ]; then
        {compiler} "$@" -O0 || exit; cp $made $kept.$$; mv $kept.$$ $kept
      fi
      cp $kept $made
  '''))


@pytest.fixture(scope='module')
def warm(quick_compiler, tmp_path_factory):
  """Returns a cache that two processes have filled at the same time."""
  cache = tmp_path_factory.mktemp('warm')
  with pytest.MonkeyPatch.context() as patch:  # Compiles once for both.
    patch.setenv('CXX', str(quick_compiler))
    patch.setenv('XDG_CACHE_HOME', str(tmp_path_factory.mktemp('first')))
    library.build()
  wish = dict(CXX=quick_compiler, SPDF_NATIVE='require')
  children = [start(BUILD, cache, **wish) for _ in range(2)]
  return cache, [finish(child) for child in children]


@pytest.mark.process
@needs_compiler
def test_two_processes_that_build_at_once_both_succeed(warm):
  cache, results = warm
  assert [code for *_, code in results] == [0, 0], results
  (path,) = cache.glob('spdf_jax/*/libspdf.so')
  assert {out.strip() for out, *_ in results} == {str(path)}
  # Nothing of the work is left.
  assert sorted(path.name for path in path.parent.iterdir()) == [
      'libspdf.so', 'libspdf.so.sha256'
  ]


@pytest.mark.process
@needs_compiler
@pytest.mark.parametrize('what', ['text', 'another library'])
def test_a_library_without_the_functions_is_reported(
    quick_compiler, what, tmp_path
):
  last = 'for a; do made=$a; done; [ $made = --version ] && exit; '
  script = write_script(tmp_path / 'cxx', last + {
      'text': 'echo code > $made',
      'another library': (
          'echo "int x;" > $made.cc; '
          f'exec {quick_compiler} -shared -fPIC $made.cc -o $made'
      ),
  }[what])
  out, err, code = run(IS_AVAILABLE, tmp_path / 'cache', CXX=script)
  assert (out, code) == ('False False\n', 0), err
  (warning,) = err.splitlines()
  assert 'native kernels are not used: ' in warning
  assert f'delete {tmp_path}/cache' in warning and 'so that they' in warning
  assert ('undefined symbol: spdf_' in warning) == (what == 'another library')


@pytest.mark.process
def test_the_library_is_not_built_if_spdf_native_is_off(tmp_path):
  out, err, code = run(IS_AVAILABLE, tmp_path / 'cache', SPDF_NATIVE=0)
  assert (out, code) == ('False False\n', 0), err
  assert 'native kernels' not in err  # Disabled kernels need no warning.
  assert not (tmp_path / 'cache').exists()


@pytest.mark.process
def test_requiring_the_library_without_a_compiler_is_an_error(tmp_path):
  _, err, code = run(
      IS_AVAILABLE, tmp_path, SPDF_NATIVE='require', CXX='/no/cxx'
  )
  assert code == 1
  assert err.splitlines()[-1] == (
      'spdf_jax.accelerator.native.library.Unavailable: native kernels are '
      'not used: there is no C++ compiler (/no/cxx) on PATH; install one, or '
      'set the environment variable CXX to its path.'
  )


def warning_of(dtype, cache, **changes):
  """Multiplies by the reference; returns the only warning, and the log."""
  code = MULTIPLY.replace('DTYPE', f'"{dtype}"')
  out, err, status = run(code, cache, **changes)
  available, reference, product = out.splitlines()
  assert (available, status) == ('False', 0), err
  assert product == reference
  (warning,) = [line for line in err.splitlines() if 'native' in line]
  return warning, err


@pytest.mark.process
def test_without_a_compiler_it_warns_once_and_uses_the_reference(
    no_compiler, tmp_path
):
  warning, err = warning_of('float32', tmp_path / 'cache', **no_compiler)
  assert 'there is no C++ compiler (g++, clang++, c++) on PATH' in warning
  assert 'Traceback' not in err


@pytest.mark.process
@needs_compiler
def test_without_kernels_of_bfloat16_it_warns_once_and_uses_the_reference(
    warm, quick_compiler
):
  wish = dict(CXX=quick_compiler, SPDF_NATIVE_KERNELS='portable')
  warning, _ = warning_of('bfloat16', warm[0], **wish)
  assert 'bfloat16 are not used: they need a processor with AVX-512' in warning


@pytest.mark.process
@needs_compiler
def test_a_compiler_that_knows_no_bfloat16_builds_the_other_kernels(
    quick_compiler, tmp_path
):
  old = write_script(tmp_path / 'old', (
      'case "$*" in *-mavx512bf16*) echo "error: no -mavx512bf16" >&2; exit 1;;'
      f' esac; exec {quick_compiler} "$@"'
  ))
  code = BUILD + MULTIPLY.replace('DTYPE', '"bfloat16"')
  out, err, status = run(code, tmp_path / 'cache', CXX=old, SPDF_NATIVE=1)
  assert (out.splitlines()[1], status) == ('False', 0), err
  assert 'a compiler that supports it' in err


@pytest.mark.process
@needs_compiler
@pytest.mark.parametrize('reason', ['refused', 'not compiled'])
def test_tiles_that_cannot_be_used_are_logged_once(
    quick_compiler, tmp_path, reason
):
  if not native.is_available('bfloat16'):
    pytest.skip('there are no kernels of bfloat16 here')
  fails = 'case "$*" in *-mamx*) echo "error: no AMX" >&2; exit 1;; esac; '
  compiler = write_script(tmp_path / 'compiler', (
      f'{fails if reason == "not compiled" else ""}case "$*" in *handlers*) '
      f'set -- -DSPDF_TILES_PERMITTED={int(reason != "refused")} "$@";; esac; '
      f'exec {quick_compiler} "$@"'
  ))
  code = MULTIPLY.replace('DTYPE', '"bfloat16"').replace(
      'native.is_available()', 'native.has_matrix_unit()'
  ).replace('w > 0.5', 'w < 9').replace('(9, 40)', '(9, 32)').replace(
      '(40, 30)', '(32, 32)'
  ) + 'print(native.has_matrix_unit(), native.kernels("bfloat16"))'
  out, err, status = run(code, tmp_path / 'cache', CXX=compiler)
  assert (out.splitlines()[-1], status) == ('False avx512bf16', 0), err
  (warning,) = [line for line in err.splitlines() if 'AMX' in line]
  assert {
      'refused': 'the operating system refused its registers',
      'not compiled': 'install g++ 11 or later',
  }[reason] in warning
