"""Timings against peers and long experiments, one file per chapter: `python -m benchmarks -h`."""
