"""From a graph to an `nn.Module`: the model, its memory, its initial weights, and checks of guarantees."""
