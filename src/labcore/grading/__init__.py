"""A class's notebooks: taken in, run in a sandbox, judged outside of it, entered and reported."""
