"""A module for ray_protocol.py to import."""

NBYTES = 4096
