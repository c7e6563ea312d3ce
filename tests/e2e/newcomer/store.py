"""A protocol of one's own: pages that a client puts into a server's memory, as a state machine.

`Hasty` has a mistake: it uses its buffer again before the write has ended. Written from
docs/howto/protocol.md alone; pytest runs it.
"""

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from tep.testing import ClusterMachine

PAGE = 64


class Store(ClusterMachine):
    faults = "order posting"
    patient = True

    def begin(self):
        client, server = self.cluster.engines
        self.client, self.buffer, self.pages = client, bytearray(PAGE), bytearray(4 * PAGE)
        self.mr, _ = client.reg_mr(self.buffer)
        _, self.desc = server.reg_mr(self.pages)
        self.values, self.sent = {}, []

    @rule(page=st.integers(0, 3), value=st.integers(1, 255))
    def put(self, page, value):
        self.buffer[:] = bytes([value]) * PAGE
        sent = self.client.submit_single_write(PAGE, (self.mr, 0), (self.desc, page * PAGE))
        if self.patient:
            sent.wait()
        self.sent.append(sent)
        self.values[page] = value

    @rule()
    def look(self):
        while self.sent:
            self.sent.pop().wait()
        for page, value in self.values.items():
            assert self.pages[page * PAGE : (page + 1) * PAGE] == bytes([value]) * PAGE


class Hasty(Store):
    patient = False


TestStore, TestHasty = Store.TestCase, Hasty.TestCase
TestStore.settings = TestHasty.settings = settings(
    max_examples=20,
    deadline=None,
    database=None,
    phases=[Phase.generate, Phase.shrink],  # to explain the failure takes thrice as long as these
)
