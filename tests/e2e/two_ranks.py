"""Two processes: rank 0 writes 256 pages into rank 1's memory, in an order of its own."""

import numpy as np

import tep

page_bytes, npages = 4096, 256
places = np.random.default_rng(0).permutation(npages)

engine = tep.TransferEngine.open("libfabric", provider="tcp", nics=["127.0.0.1"])
with engine, tep.rendezvous.join() as ranks:
    memory = np.full((npages, page_bytes), ranks.rank, np.uint8)
    memory[:, 0] = np.arange(npages)
    mr, desc = engine.reg_mr(memory)
    descs = [tep.MrDesc.from_bytes(raw) for raw in ranks.all_gather(desc.to_bytes())]

    if ranks.rank == 0:
        src, dst = tep.Pages(range(npages)), tep.Pages(places)
        engine.submit_paged_writes(page_bytes, (mr, src), (descs[1], dst), imm=42).wait()
    else:
        engine.expect_imm_count(42, npages).wait()  # one for each page, each after its bytes
        assert (memory[places, 0] == np.arange(npages)).all()
        assert not memory[:, 1:].any()
        print(f"{memory.nbytes} bytes are here")  # noqa: T201  # it is a program
    ranks.barrier()  # nobody leaves while a peer still needs it
