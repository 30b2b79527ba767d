"""Functions over specs and models that return data; the command line prints it."""
