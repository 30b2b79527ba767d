"""The weight map: how the tensors of a published checkpoint become those of a model, and back, bit for bit."""
