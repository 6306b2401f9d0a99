"""The prefill engine's end: lease blocks, serve them, and take them back.

lease.py         which blocks are leased, and until when
block_server.py  answers a request, for every kind of source
grpc_source.py   serves blocks over gRPC
"""
