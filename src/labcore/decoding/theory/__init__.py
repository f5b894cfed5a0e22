"""Theory of acceptance: exact distributions, acceptance rates, speedups."""
