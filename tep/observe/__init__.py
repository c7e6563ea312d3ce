"""Observation of engines: traces, metrics, and the answers to `tep top` and `tep stall`."""
