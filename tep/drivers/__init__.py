"""Drivers own time and turn engines: worker threads, inline, and callers that turn."""
