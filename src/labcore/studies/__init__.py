"""The training chapters' experiments, which benchmarks record: one folder per chapter."""
