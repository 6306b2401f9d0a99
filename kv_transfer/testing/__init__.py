"""Test doubles, for our tests and for those of other transports.

memory_transport.py  a transport inside one process
faults.py            a puller that fails on purpose
"""
