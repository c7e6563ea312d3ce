"""The messages of engines beside their rows: who lives, what landed, what failed.

All of it stands on control messages (clause C24), which NICs may lose, repeat and reorder.
"""
