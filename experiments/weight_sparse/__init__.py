"""Weight-sparse GPTs that one can read: Gao et al., 2025."""
