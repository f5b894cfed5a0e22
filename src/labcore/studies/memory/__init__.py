"""Experiments of the chapter `memory`."""
