"""Figure functions of the chapters: plain arguments in, plotly Figure out; one module a chapter."""
