"""Functions that tests run by name: an importable local package, as a user's own would be."""
