"""The papers' experiments: claims, the arms they compare, and their runs."""
