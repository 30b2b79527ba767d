"""The specs at hand."""
