"""The command `tensors`."""
