"""Measures speed and memory: python -m experiments.benchmark --suite=NAME.

  python -m experiments.benchmark --suite=train_step
  python -m experiments.benchmark --suite=topk --output=topk.json

The variants that a suite compares are timed alternately, A B A B …, and paired;
a row has the median over the pairs and its 95 % bootstrap interval. A target is
`missed` if the whole interval is beyond it, and only then is the exit status 1.
It is `undecided` if the interval contains the target: raise --repeats, or use a
machine with less load. A suite takes several minutes and prints its table at
the end.
"""

from absl import flags

from experiments.benchmarks import SUITES
from experiments.benchmarks.suite_runs import run_suite
from experiments.launch import console

_SUITE = flags.DEFINE_string(
    'suite', None, f'Suite to run: {", ".join(SUITES)}.'
)
_OUTPUT = flags.DEFINE_string('output', None, 'JSON file for the rows.')
_REPEATS = flags.DEFINE_integer(
    'repeats', None, "Rounds of timing; by default the suite's own number.",
    lower_bound=1,
)


def main(argv: list[str]) -> int:
  """Runs the command; returns its exit status."""
  return console.run(
      argv, run_suite, _SUITE.value, _OUTPUT.value, _REPEATS.value
  )


if __name__ == '__main__':
  flags.mark_flag_as_required('suite')
  console.start(main)
