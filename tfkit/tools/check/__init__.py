"""Measuring the properties that tfkit guarantees. Each holds for a model, fails at a component, or does not apply."""
