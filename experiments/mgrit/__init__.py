"""What multigrid in time does to gradients, to accuracy and to the time of a training step."""
