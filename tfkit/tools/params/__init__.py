"""The parameters of a model, counted."""
