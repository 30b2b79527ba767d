"""From a resolved spec to a graph, with connected wires and checked signals."""
