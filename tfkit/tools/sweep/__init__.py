"""Sweeps: training the missing runs of a sweep, and the paired comparison of their results."""
