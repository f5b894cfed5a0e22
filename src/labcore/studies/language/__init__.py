"""A small language model, trained as large ones are: the bench of the training chapters."""
