"""The prefill engine's end: blocks are promised, served, taken back.

lease.py         which blocks are promised to whom, until when
block_server.py  what every source does with a request
grpc_source.py   serves blocks over gRPC
journal.py       the lives of the last hand-offs
"""
