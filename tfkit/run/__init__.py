"""Runs: their documents, the contract of the kinds in their slots, these kinds, and the training loop.

Nothing below this package knows runs. It reaches tfkit as a plugin, `plugin.py`. Its documents and the contract import
no torch; `training/` and the kinds do.
"""
