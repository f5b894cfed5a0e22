"""What the chapters run and the benchmarks record: the experiments, a folder for each chapter."""
