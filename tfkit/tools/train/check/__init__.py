"""Properties of a run, for `tfkit check RUN`."""
