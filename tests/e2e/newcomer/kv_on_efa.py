"""A question of one's own: the KV cache of a 70B model, 8K tokens, from node to node on EFA.

How large have its pages to be, and what does one slow NIC cost? Written from
docs/howto/questions.md alone.
"""

import tep

KiB, GiB = 2**10, 2**30
KV = 5 * GiB // 2  # 80 layers x 2 x 8 heads x 128 x bf16: 320 KiB a token

times = tep.sim.transfer_time(KV, "efa_4x100", page_bytes=[16 * KiB, 128 * KiB], parts=80)
print(times)
small, large = (row["time, ms"] for row in times.rows)
print(f"pages of 128 KiB save {1 - large / small:.0%}")

(cost,) = tep.sim.fault_cost(KV, "efa_4x100", page_bytes=128 * KiB, parts=80, slow=4).rows
print(
    f"a NIC at a quarter of its speed: {cost['slow NIC, times']:.2f} times as long, "
    f"{cost['slow NIC, least']:.2f} at the least"
)
times.write("kv.csv")
