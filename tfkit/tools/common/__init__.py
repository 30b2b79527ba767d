"""Code that tools share: files, memory, formatted numbers. It imports no tool."""
