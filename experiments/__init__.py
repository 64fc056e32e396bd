"""Commands: `python -m experiments.NAME --help`."""
