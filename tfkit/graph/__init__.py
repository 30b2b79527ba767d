"""From a resolved spec to a checked graph: its wires connected, and the signals on them checked."""
