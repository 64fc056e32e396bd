"""Studies of the modeled wafer: published numbers, executions, sweeps, plots."""
