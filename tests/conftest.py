"""Settings of the test session."""

import gc
import os
import pathlib
import tempfile

import pytest

# Programs compiled once serve every worker and every child process; tests
# compile them far longer than they run. Set before jax is imported.
for name, value in dict(
    COMPILATION_CACHE_DIR=os.path.join(
        tempfile.gettempdir(), f'spdf_jax_test_cache_{os.getuid()}'
    ),
    PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS='0',
    PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES='-1',
    DISABLE_MOST_OPTIMIZATIONS='true',
    TRACEBACK_IN_LOCATIONS_LIMIT='0',
).items():
  os.environ.setdefault(f'JAX_{name}', value)
# Without optimizations XLA:CPU compiles in 60 % of the time if it does not use
# its fusion emitters. A flag given by the environment comes last and wins.
os.environ['XLA_FLAGS'] = ' '.join((
    '--xla_cpu_use_fusion_emitters=false',
    '--xla_cpu_parallel_codegen_split_count=1',
    os.environ.get('XLA_FLAGS', ''),
))

# A process may hold some 65,000 memory maps; each program takes about three.
_MANY_MAPS = 40_000


def pytest_collection_finish():
  """Saves the collector walks over the modules and the tracers of every test.
  """
  gc.freeze()
  gc.set_threshold(50_000, 20, 20)


@pytest.fixture(autouse=True, scope='module')
def _free_compiled_programs():
  yield
  maps = pathlib.Path('/proc/self/maps')
  if maps.exists() and maps.read_bytes().count(b'\n') > _MANY_MAPS:
    import jax
    jax.clear_caches()
