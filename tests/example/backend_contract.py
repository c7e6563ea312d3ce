"""The contract's suite on a backend, as docs/howto/backend.md says; here the loopback."""

import pytest

from tep.backends.loopback import open_domains
from tep.testing.contract import DomainContract, OpenWorld


class TestLoopback(DomainContract):
    @pytest.fixture
    def world(self):
        with OpenWorld(lambda nics: open_domains(nics=nics)) as world:
            yield world
