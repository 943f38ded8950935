"""Modules inside the graphs of torch.compile."""
