"""The course on one machine: the local server, the doctor, the address, and new chapters."""
