"""Memory that may be registered, its parts, and words in it that are watched."""
