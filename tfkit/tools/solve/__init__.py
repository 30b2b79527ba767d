"""The sizes of a spec's family that fit a budget."""
