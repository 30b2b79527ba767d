"""Training of tokenizers."""
