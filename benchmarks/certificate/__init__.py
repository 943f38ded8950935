"""Whether reports are right: error estimates of many solves, compared with float64."""
