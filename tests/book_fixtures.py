"""Fixtures of the built book."""
