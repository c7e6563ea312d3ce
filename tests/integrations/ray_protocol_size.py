"""What ray_protocol.py imports."""

NBYTES = 4096
