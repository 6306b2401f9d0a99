"""Malformed input to every port of Ridgeline.

run.py                  the long run over all targets
campaign.py             many examples in seeded batches
targets.py              what is fuzzed, and what must hold afterwards
server.py               the server under test, with fake engines
server_process.py       starts it and looks at it from outside
http_bodies.py          malformed HTTP requests
openapi_cases.py        requests made from the server's own OpenAPI document
grpc_messages.py        malformed gRPC
collective_messages.py  what a hostile source of tensors could say
msgpack_damage.py       messages that are almost right
transfer_frames.py      malformed transfer frames
"""
