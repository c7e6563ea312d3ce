"""`tep doctor`: what of this machine works for transfers, what does not, and what mends it."""
