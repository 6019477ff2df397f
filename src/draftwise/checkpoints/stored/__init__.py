"""Checkpoints whose weights are stored quantised, and checks of what was read of a checkpoint."""
