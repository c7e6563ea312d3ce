"""Plug-ins for other systems, on tep's public names. Nothing is imported before its use."""
