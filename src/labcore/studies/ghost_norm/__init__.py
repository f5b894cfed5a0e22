"""The experiments of the chapter on ghost batch normalization."""
