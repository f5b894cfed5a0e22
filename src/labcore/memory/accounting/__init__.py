"""Bytes of a training step: measured by the meter, predicted from shapes."""
