"""Drafting heads: small models that read hidden states of the target."""
