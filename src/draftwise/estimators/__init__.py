"""Estimators: from signals to the probability that the target accepts a drafted token."""
