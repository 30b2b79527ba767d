"""Interpretability: values inside a model, read and written by name, and their effect on the output."""
