"""`python -m benchmarks.calibrate`: measures the constants of `auto` on this machine, beside those that are stored.

Each line is a constant, where it stands, its stored value, and the same measured here. A constant is a threshold on one
machine and need not be met to the digit: change one where a measured value is far off on machines that matter, and run
the headline benchmark before and after. `--only WORD` measures those whose names hold a word.
"""
