"""A model in words."""
