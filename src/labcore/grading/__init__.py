"""Grading a class: collect its notebooks, run them in a sandbox, judge the answers, report."""
