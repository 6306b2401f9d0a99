"""What KV looks like while it travels.

frames.py        blocks of one layer behind a header with a checksum
codec.py         as they are, or one byte an element
grpc_methods.py  names, limits and errors of the gRPC transport
"""
