"""A config.json as a spec, and back."""
