"""What every room stands on: the nouns a user writes, errors, addresses, units and checks."""
