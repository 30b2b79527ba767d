"""The built-in kinds of rules for the fields of config.json."""
