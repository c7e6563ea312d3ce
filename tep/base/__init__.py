"""The base of all packages: the nouns a user writes, errors, addresses, units and checks."""
