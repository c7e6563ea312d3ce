"""The machine that is turned: a verb becomes rows on NICs, and completions become counts.

It reads no clock, draws no random number and starts no thread; it knows NICs by the seam alone.
"""
