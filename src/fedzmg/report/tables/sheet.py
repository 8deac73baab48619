"""Former names of :mod:`fedzmg.report.tables.table`."""

from fedzmg.report.tables.table import NOTHING, Cell, Record, Table, Value

Sheet = Table

__all__ = ["NOTHING", "Cell", "Record", "Sheet", "Value"]
