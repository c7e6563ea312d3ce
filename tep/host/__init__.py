"""This machine: its GPUs and NICs, its files and environment, and the doctor's checks."""
