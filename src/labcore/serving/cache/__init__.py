"""Paged KV caches: keys and values in pages of one pool, and the attention that reads them."""
