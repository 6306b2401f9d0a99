"""The formats of KV in transit.

frames.py        blocks of one layer behind a header with a checksum
codec.py         blocks as they are, or with one byte per element
grpc_methods.py  names, limits and errors of the gRPC transport
"""
