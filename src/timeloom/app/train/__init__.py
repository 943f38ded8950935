"""Training of the application: configuration, model, trainer, checkpoints, reports."""
