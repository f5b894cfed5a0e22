"""An engine in a process of its own: a Unix socket, its client, and what keeps processes alive."""
