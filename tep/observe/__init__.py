"""Observation of engines: traces, metrics, and the answers to `tep stall`."""
