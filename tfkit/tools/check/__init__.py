"""The properties that tfkit guarantees, measured: each holds for a model, fails at a component, or does not apply."""
