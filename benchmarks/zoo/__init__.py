"""Trained networks: made by real training from seeds, then timed and held against float64 beside torch's own layers."""
