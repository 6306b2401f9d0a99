"""What prefill and decode workers share: the process around an engine, and the router's line to it.

host.py    life cycle, sessions with routers, cancel, drain, status
client.py  the router's end: tasks out, deltas in
"""
