"""What a router can carry: a real router and real worker hosts, fake engines, and clients that only count.

bench.py    runs router, workers and clients, and writes what a token costs
servers.py  a router, or workers that make tokens at a fixed pace, in a process of its own
streams.py  clients that hold many streams open and measure their gaps
"""
