"""The experiments of the chapter on shuffling."""
