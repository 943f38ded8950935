"""Measures timeloom against cuDNN and others on a GPU, in pieces of a few minutes: `python -m benchmarks.gpu`."""
