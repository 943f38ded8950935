"""Data of the application: series and their labels from files, archives and a built-in task."""

from timeloom.app.data.batches import Batch, batches
from timeloom.app.data.reading import Reading
from timeloom.app.data.records import Record, Table
from timeloom.app.data.sources import load, prepare
from timeloom.app.data.splits import Examples, Splits, examples, split

__all__ = [
    "Batch",
    "Examples",
    "Reading",
    "Record",
    "Splits",
    "Table",
    "batches",
    "examples",
    "load",
    "prepare",
    "split",
]
