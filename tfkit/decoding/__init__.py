"""Incremental decoding, and generation token by token."""
