"""From a graph to an `nn.Module`: the model, its memory, its first weights, and what tfkit guarantees of it."""
