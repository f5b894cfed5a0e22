"""The course on one machine: the local server, the doctor and the repository's address."""
