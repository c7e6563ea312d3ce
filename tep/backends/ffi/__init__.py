"""Foreign libraries: how they are found, called and checked. No policy, no engine, no data path.

Only modules of this room hold ctypes declarations; a C name stays a C name here and nowhere else.
"""
