"""Profiles: what passes cost on this machine, and what the target accepts of this draft."""
