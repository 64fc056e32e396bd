"""Plans within a budget: stages, and the time of a step on machines."""
