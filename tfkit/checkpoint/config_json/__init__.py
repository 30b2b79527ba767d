"""The config.json that lies beside published weights, read and written."""
