"""The formats of KV in transit.

frames.py        blocks of one layer behind a header with a checksum
grpc_methods.py  names, limits and errors of the gRPC transport
"""
