"""Kernels written for Draftwise: C++ for CPUs (``native``) and Triton for CUDA (``triton``)."""
