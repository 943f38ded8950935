"""Measures timeloom against torch.nn on this machine's CPU: `python -m benchmarks headline grid`."""
