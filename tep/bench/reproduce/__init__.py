"""Published tables and figures beside simulated values, with their errors.

`tables` has the published numbers, `runs` simulates them. Facts are in data/*.csv; no model and no
number of a machine is here.
"""

from tep.bench.reproduce.tables import Point, Table, load_table, table_names

__all__ = ["Point", "Table", "load_table", "table_names"]
