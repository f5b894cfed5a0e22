"""The chapters' experiments, which benchmarks record and figures show: a folder per chapter."""
