"""How a step's tokens go through a model: one module per way, each a `Forward`."""
