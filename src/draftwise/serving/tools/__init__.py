"""Functions that a model may call: what it is told of them, and how its calls are read."""
