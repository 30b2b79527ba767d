"""The differences between two specs."""
