"""The experiments of the chapter on gradient clipping."""
