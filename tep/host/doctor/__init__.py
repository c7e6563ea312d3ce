"""`tep doctor`: checks of a machine for transfers, with a remedy for each fault."""
