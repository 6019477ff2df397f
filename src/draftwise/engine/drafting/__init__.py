"""Drafting with a language model: one loop, and the backends that draw tokens."""
