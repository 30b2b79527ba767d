"""The command `validate`."""
