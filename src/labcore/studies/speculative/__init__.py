"""The speculative chapter's experiments: who guessed each token, and what a pass is made of."""
