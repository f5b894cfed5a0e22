"""The course on one machine: the local server, the doctor, the repository's address."""
