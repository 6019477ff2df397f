"""Models: loading, refusing what cannot be served, and the forward pass over packed tokens."""
