"""Exact numbers of weights."""


def number_kept(size: int, sparsity: float) -> int:
  """Returns how many of `size` weights stay at a sparsity, at least one."""
  return max(1, size - round(float(sparsity) * size))
