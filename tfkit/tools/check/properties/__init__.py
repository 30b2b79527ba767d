"""The properties, a file for each group."""
