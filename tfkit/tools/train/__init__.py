"""Training: the folder that a run is written to, its plan, and the command."""
