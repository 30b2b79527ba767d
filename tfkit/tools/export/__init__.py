"""Models in formats that run without tfkit: `export`."""
