"""This machine: its GPUs and NICs, files and environment; what is wrong with it."""
