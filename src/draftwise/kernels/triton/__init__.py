"""Triton's kernels for CUDA. Triton is part of PyTorch's builds for CUDA."""
