"""The interfaces of other systems on top of tep, for programs that should not change."""
