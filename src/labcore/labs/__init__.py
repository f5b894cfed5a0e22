"""Turns a lab's source into a release, a class's variants and a repository for students."""
