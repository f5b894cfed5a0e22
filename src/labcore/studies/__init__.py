"""The experiments that chapters run and benchmarks record, with one folder per chapter."""
