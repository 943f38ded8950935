"""The application: command line, data, training, video."""
