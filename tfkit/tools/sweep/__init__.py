"""Sweeps: the runs of a plan, those that are missing made; and the paired comparison of their results."""
