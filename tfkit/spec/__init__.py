"""A spec: from YAML text to checked configs, every value with its place in the text."""
