"""The weight map: the tensors of a published checkpoint become those of a model, and back, bit for bit."""
