"""The experiments of the chapter on tensor parallelism."""
