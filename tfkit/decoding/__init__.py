"""Reading sequences in pieces, and writing them token by token."""
