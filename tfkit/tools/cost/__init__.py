"""The costs of a model: FLOPs, bytes moved, memory, and the minimum time on a device."""
