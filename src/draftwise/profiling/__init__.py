"""Profiles: pass times on this machine, and acceptance statistics of target and draft."""
