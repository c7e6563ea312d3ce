"""The look-alike under NIXL's name, for `python -m tep.compat.nixl -- COMMAND`."""

from __future__ import annotations

import sys

from tep.compat.nixl import api as _api
from tep.compat.nixl import bindings as _bindings
from tep.compat.nixl import nixl_agent, nixl_agent_config

__all__ = ["nixl_agent", "nixl_agent_config"]

sys.modules["nixl._api"], sys.modules["nixl._bindings"] = _api, _bindings
for _module in (_bindings, _api):  # all of their names, as in NIXL's package
    globals().update({name: getattr(_module, name) for name in _module.__all__})
