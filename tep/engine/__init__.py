"""The engine as its users see it. `verbs` is the face, `machine` what a driver turns.

Names only.
"""

from tep.core.regions import PeerGroup
from tep.engine.prepared import Prepared
from tep.engine.verbs import TransferEngine

__all__ = ["PeerGroup", "Prepared", "TransferEngine"]
