"""The weight map: converts the tensors of a published checkpoint to the tensors of a model and back, bit for bit."""
