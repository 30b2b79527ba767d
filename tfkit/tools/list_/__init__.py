"""The available specs, runs and sweeps."""
