"""What engines did and do: traces, metrics, and answers to `tep top` and `tep stall`."""
