"""A training step that is not wasteful: the loss in pieces, and which parameters decay."""
