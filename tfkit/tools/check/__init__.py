"""A model, measured against every property that tfkit promises: each holds, fails at a component, or does not apply."""
