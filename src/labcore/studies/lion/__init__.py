"""The experiments of the chapter on Lion."""
