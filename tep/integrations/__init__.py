"""Plug-ins for other systems, on tep's public names. Nothing is imported before it is asked for."""
