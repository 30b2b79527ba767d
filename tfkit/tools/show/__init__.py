"""The values of a spec, each with its origin."""
