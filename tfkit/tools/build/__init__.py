"""The command `build`, and the first run of a new model."""
