"""The config.json beside published weights, read and written."""
