"""Trained networks: really trained from seeds, then timed and compared with float64, together with torch's layers."""
