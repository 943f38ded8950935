"""Random networks, inputs and solvers, judged against float64 together with torch's own layer. See __main__.py."""
