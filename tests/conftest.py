"""Settings of the test session."""

import os
import tempfile

# Programs compiled once serve every worker and every child process; set
# before jax is imported.
os.environ.setdefault(
    'JAX_COMPILATION_CACHE_DIR',
    os.path.join(tempfile.gettempdir(), f'spdf_jax_test_cache_{os.getuid()}'),
)
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0.2')
