"""The engine's share of the contract: subclass EngineContract, give it an `engines` fixture.

    import pytest
    import tep
    from tep.testing.contract_engine import EngineContract, OpenEngines

    class TestMyEngines(EngineContract):
        @pytest.fixture
        def engines(self):
            with OpenEngines(lambda: tep.TransferEngine.open("my_backend", nics=2)) as engines:
                yield engines

No test lives here: they are in `clauses_engine`.
"""

from __future__ import annotations

from tep.testing.clauses_engine import EngineContract, Engines, OpenEngines

__all__ = ["EngineContract", "Engines", "OpenEngines"]
