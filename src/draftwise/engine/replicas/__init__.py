"""Data-parallel drafting: a draft and a companion per device, each for a share of every batch."""
