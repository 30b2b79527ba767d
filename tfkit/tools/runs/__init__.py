"""Runs that belong to no sweep: what they mean without their seeds, and the sweep's comparison of them."""
