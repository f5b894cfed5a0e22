"""Weights in eight or four bits: the form to read, torchao's, and what a model saves by either."""
