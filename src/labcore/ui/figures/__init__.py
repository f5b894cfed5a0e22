"""Figures for the chapters, one module each: plain arguments in, plotly Figure out."""
