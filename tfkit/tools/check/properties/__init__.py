"""The properties, in a file for each group."""
