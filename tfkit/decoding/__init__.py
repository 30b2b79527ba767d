"""Reading of sequences in pieces, and generation token by token."""
