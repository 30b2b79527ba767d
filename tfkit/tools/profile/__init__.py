"""The time and the memory of a step, by the spec's own names: `profile` and `profile_models`."""
