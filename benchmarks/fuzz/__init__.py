"""Random networks, inputs and solvers, each judged against float64 beside torch's own layer. See __main__.py."""
