"""Fine-tuning tasks by name."""

from collections.abc import Callable
from collections.abc import Mapping

from spdf_jax.data.tasks.docstrings import docstring_pairs
from spdf_jax.data.tasks.docstrings import python_docstrings
from spdf_jax.data.tasks.task import Pair
from spdf_jax.data.tasks.task import Task
from spdf_jax.names import lookup

__all__ = ['Pair', 'Task', 'docstring_pairs', 'load_task', 'python_docstrings']

_TASKS: Mapping[str, Callable[[], Task]] = {
    'python-docstrings': python_docstrings,
}


def load_task(name: str) -> Task:
  """Reads a task by its name.

  Args:
    name: `'python-docstrings'`: Python signatures to the first lines of
      their docstrings, from the running Python's standard library.

  Returns:
    The task.

  Raises:
    ValueError: `name` is unknown.

  Example:
    >>> load_task('python-docstring')
    Traceback (most recent call last):
    ...
    ValueError: task 'python-docstring' is unknown; did you mean \
'python-docstrings'?
  """
  return lookup('task', name, _TASKS)()
