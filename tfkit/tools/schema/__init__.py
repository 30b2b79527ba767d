"""The command `schema`."""
