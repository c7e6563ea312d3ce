"""NIXL's loggers: below `nixl`, to stdout, from the level of NIXL_LOG_LEVEL on (INFO)."""

from __future__ import annotations

import logging
import os
import sys

__all__ = ["get_logger"]


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module."""
    top = logging.getLogger("nixl")
    if not top.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(asctime)s NIXL %(levelname)-7s %(message)s"))
        top.addHandler(handler)
        top.propagate = False
        level = os.environ.get("NIXL_LOG_LEVEL", "INFO").upper()
        known = logging.getLevelNamesMapping() | {"TRACE": logging.DEBUG}
        top.setLevel(known.get(level, logging.INFO))
    return top.getChild(name.lstrip("_"))
