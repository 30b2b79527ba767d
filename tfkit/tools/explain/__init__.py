"""A description of a model: its components, their sizes and their costs."""
