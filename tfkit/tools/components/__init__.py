"""The documentation of components."""
