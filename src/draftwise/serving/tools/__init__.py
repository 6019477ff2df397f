"""Functions that a model may call: how they reach its prompt, and how its calls are parsed."""
