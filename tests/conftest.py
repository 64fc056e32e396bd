"""Settings of the test session."""

import os
import tempfile

import pytest

# Programs compiled once serve every worker and every child process; set
# before jax is imported.
os.environ.setdefault(
    'JAX_COMPILATION_CACHE_DIR',
    os.path.join(tempfile.gettempdir(), f'spdf_jax_test_cache_{os.getuid()}'),
)
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0.2')


@pytest.fixture(scope='module')
def masks_by_xla():
  """Has XLA choose masks, whatever kernels this process has loaded."""
  import jax

  from spdf_jax.accelerator.native import library
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(library, 'is_loaded', lambda: False)
    jax.clear_caches()
    yield
  jax.clear_caches()
