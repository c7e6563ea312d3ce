"""What is special about shared memory: processes, files in /dev/shm, neighbours, a table of peers.

Rows, completions and messages go the way of all providers: slots.py, completions.py, mailbox.py.
"""
