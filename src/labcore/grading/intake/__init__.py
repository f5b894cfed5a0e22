"""What students handed in, in whatever form, as one list of notebooks."""
