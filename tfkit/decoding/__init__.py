"""Incremental decoding, and generation of tokens."""
