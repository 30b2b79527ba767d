"""Conversion of a config.json to a spec, and back."""
