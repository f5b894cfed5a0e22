"""An engine in a separate process: a Unix socket, its client, and a process supervisor."""
