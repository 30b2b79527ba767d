"""The costs of a model: FLOPs, bytes moved, memory, and the least time that a device needs."""
