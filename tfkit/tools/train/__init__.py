"""Training: the run folder, the plan of a run, its report, and the command."""
