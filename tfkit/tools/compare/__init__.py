"""Two models, run on the same inputs and compared component by component."""
