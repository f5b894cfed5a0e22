"""The exercises of each lab, a folder each."""
