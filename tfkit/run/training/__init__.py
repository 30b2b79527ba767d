"""The training loop and its parts: loss, optimizer, evaluation, checkpoints, and several processes."""
