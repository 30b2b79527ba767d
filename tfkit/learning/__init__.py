"""The parts of a training step that work with any loop: the loss in chunks, and parameter groups."""
