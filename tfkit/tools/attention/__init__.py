"""The attention weights of a model."""
