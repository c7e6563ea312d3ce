"""What is special about AWS EFA: options, limits, errors, reads, and how peers are forgotten.

Rows, completions and messages go the way of all providers: slots.py, completions.py, mailbox.py.
EFA has one endpoint a NIC and no state for each peer but an entry of the address vector.
"""
