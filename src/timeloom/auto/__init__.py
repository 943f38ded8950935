"""`auto`: candidates, experience and costs, in one folder."""
