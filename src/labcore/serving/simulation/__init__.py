"""Simulated serving, without a model: workloads, step costs, several machines, plottable runs."""
