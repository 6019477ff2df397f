"""Estimators of the probability that the target accepts a drafted token, given its signals."""
