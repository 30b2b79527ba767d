"""A training step without waste: the loss in chunks, and the parameters that decay."""
