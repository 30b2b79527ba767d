"""From a resolved spec to a checked graph: which node reads what, and whether it fits."""
