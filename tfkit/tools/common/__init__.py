"""The base of all tools: files, memory, numbers as texts. It imports none of them."""
