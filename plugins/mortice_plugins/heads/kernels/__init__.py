"""Kernels of the heads, each with its plain twin. Written for Metal and CUDA; see docs/kernels.md."""
