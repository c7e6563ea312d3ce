"""What engines say to each other beside their rows: who lives, what landed, who may write.

All of it stands on control messages (clause C24), which NICs may lose, repeat and reorder.
"""
