"""The config.json of published weights, read and written."""
