"""Timings against peers and long experiments, one file a chapter; `python -m benchmarks --help`."""
