"""Linear recurrences `h[t] = a[t] h[t-1] + b[t]`, solved by scans."""

from timeloom.scan.linear import linear_scan

__all__ = ["linear_scan"]
