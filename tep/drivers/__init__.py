"""Drivers own the time of engines and step them: by worker threads, inline, or by callers."""
