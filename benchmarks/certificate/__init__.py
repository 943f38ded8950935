"""Whether reports tell the truth: error estimates of many solves held against float64."""
