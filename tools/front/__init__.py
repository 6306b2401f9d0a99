"""What the router can carry: real routers and real gRPC, workers without engines, and clients that only count.

bench.py    runs routers, workers and clients, and writes what a token costs
router.py   one router in a process of its own
streams.py  clients that hold many streams open and measure their gaps
workers.py  workers that make tokens at a fixed pace without an engine
"""
