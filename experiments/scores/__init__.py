"""Scores of trained models: tasks, protocols of papers and score sheets."""
