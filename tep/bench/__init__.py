"""Measurements between two machines, and published figures beside simulated ones."""
