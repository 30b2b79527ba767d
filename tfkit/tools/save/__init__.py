"""Saving a model to a folder."""
