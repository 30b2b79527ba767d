"""A language model as a folder of code and weights that transformers opens with `trust_remote_code=True`."""
