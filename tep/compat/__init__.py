"""Other systems' interfaces on tep's public one, for programs that are not to be changed."""
