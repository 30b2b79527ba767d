"""A spec: from YAML text to checked configs, in which every value has a location in the text."""
