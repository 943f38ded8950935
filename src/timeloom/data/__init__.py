"""Data of the application: series and their labels from files, archives and a built-in task."""

from timeloom.data.batches import Batch, batches
from timeloom.data.records import Record, Table
from timeloom.data.sources import load
from timeloom.data.splits import Examples, Splits, examples, split

__all__ = ["Batch", "Examples", "Record", "Splits", "Table", "batches", "examples", "load", "split"]
