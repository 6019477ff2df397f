"""Data-parallel drafting: each device has a draft and a companion for its share of the batch."""
