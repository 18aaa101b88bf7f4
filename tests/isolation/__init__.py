"""Attempts from inside a container to see, use or disturb something that is not its own (docs/isolation.md)."""
