"""For tests, ours and those of other transports.

memory_transport.py  a transport inside one process
faults.py            a wire that fails on purpose
"""
