"""Systems that stand on tep; they import its public names only."""
