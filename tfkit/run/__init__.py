"""Runs: their documents, the contract of the kinds in their slots, the built-in kinds, and the training loop.

No package below this package depends on runs: tfkit loads them as a plugin, `plugin.py`. The documents and the contract
do not import torch; `training/` and the kinds do.
"""
