"""Kernels for NVIDIA GPUs in CUDA C++, compiled at run time by NVRTC, which torch brings along."""
