"""The rank of this process and the meeting point: given, or read from the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Self

from tep.base.errors import UsageError

__all__ = ["RANKS_MAX", "Place"]

RANKS_MAX: Final = 4095
"""Number of parts of 1 MiB that fit into one frame with its 32-bit length."""

_PORT_MAX: Final = 65535
_PORT: Final = "TEP_RENDEZVOUS_PORT"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The rank of this process, and the meeting point.

    Attributes:
        rank: 0 to size - 1; rank 0 listens.
        size: number of processes that meet.
        host, port: rank 0's address.
        token: a secret that all of them know; keeps strangers and other jobs out. Never printed.

    Raises:
        UsageError: a number is out of range, or there is no token.
    """

    rank: int
    size: int
    host: str = "127.0.0.1"
    port: int = 0
    token: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size <= RANKS_MAX:
            raise UsageError(
                f"rendezvous: rank={self.rank} size={self.size}; 0 <= rank < size <= {RANKS_MAX}"
            )
        if not 0 <= self.port <= _PORT_MAX:
            raise UsageError(f"rendezvous: port={self.port}; 0 to {_PORT_MAX}")
        if not self.token:
            raise UsageError(
                "rendezvous: no token; give token=, or set TEP_TOKEN, the same secret in all ranks"
            )

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def variables(self) -> dict[str, str]:
        """Return the environment variables that `from_env` reads, for the starter of this rank."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
            _PORT: str(self.port),
            "TEP_TOKEN": self.token,
        }

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Read RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun sets them.

        TEP_RENDEZVOUS_PORT goes before MASTER_PORT; if torchrun's own store is there
        (TORCHELASTIC_USE_AGENT_STORE), the next port is taken. The token is TEP_TOKEN, or
        torchrun's run id, which keeps jobs apart and is no secret.

        Raises:
            UsageError: one is missing or no number.

        Source: pytorch pull request 125743, on TORCHELASTIC_USE_AGENT_STORE; quoted.
        """
        env = os.environ if environ is None else environ
        port_name = _PORT if env.get(_PORT) else "MASTER_PORT"
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", port_name)
        missing = [name for name in names if not env.get(name)]
        if missing:
            raise UsageError(
                f"rendezvous: {', '.join(missing)} not set; start with torchrun, set them, or give "
                "tep.rendezvous.Place(rank=, size=, host=, port=, token=)"
            )
        rank, size, port = (_number(env, name) for name in ("RANK", "WORLD_SIZE", port_name))
        if port_name != _PORT and env.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            port += 1
        token = env.get("TEP_TOKEN") or env.get("TORCHELASTIC_RUN_ID") or ""
        return cls(rank=rank, size=size, host=env["MASTER_ADDR"], port=port, token=token)


def _number(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except ValueError as error:
        raise UsageError(f"rendezvous: {name}={env[name]!r} is no number") from error
