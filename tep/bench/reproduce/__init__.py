"""Published tables and figures, run through the engines on the timing fabric, with their errors.

`tables` holds what was published, `runs` simulates it, `residue` leaves points out, `report` writes
Markdown and pictures. Facts live in data/*.csv; no model and no number of a machine lives here.
"""

from tep.bench.reproduce.tables import Point, Table, load_table, table_names

__all__ = ["Point", "Table", "load_table", "table_names"]
