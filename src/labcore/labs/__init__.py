"""The labs: a source becomes a release, a class's variants, a repository for students."""
