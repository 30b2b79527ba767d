"""The time and memory of a step, by the names of the spec: `profile` and `profile_models`."""
