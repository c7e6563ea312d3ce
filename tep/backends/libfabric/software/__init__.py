"""tcp: what providers need that are software, beside what every NIC needs.

They say nothing useful of a bad key, so that the owner of a region is asked first (leases). On tcp
each peer has an endpoint of its own.
"""
