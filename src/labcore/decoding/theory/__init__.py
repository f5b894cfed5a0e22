"""What acceptance promises: exact distributions, acceptance rates, speedups."""
