"""The look-alike under Mooncake's name, for `python -m tep.compat.mooncake -- COMMAND`."""
