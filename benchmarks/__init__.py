"""Measures timeloom against torch.nn: `python -m benchmarks headline` on a CPU, `python -m benchmarks.gpu` on a GPU."""
