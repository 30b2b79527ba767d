"""The values inside a model, read and written by their names, and what they add to its output."""
