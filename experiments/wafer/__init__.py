"""Studies of the modeled wafer: validation, executions, sweeps and plots."""
