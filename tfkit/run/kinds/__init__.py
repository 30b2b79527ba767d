"""The built-in kinds of a run's slots."""
