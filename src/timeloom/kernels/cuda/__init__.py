"""Kernels for NVIDIA GPUs in CUDA C++, compiled at run time by NVRTC, which comes with torch."""
