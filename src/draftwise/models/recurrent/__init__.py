"""Layers with a recurrent state: convolutions over a few tokens, the delta rule, Mamba."""
