"""Sends malformed input to every port of Ridgeline.

run.py              the long run of all campaigns
campaign.py         runs many examples in seeded batches
targets.py          the campaigns, and what must hold afterwards
server.py           the server under test, with fake engines
http_bodies.py      malformed HTTP requests
openapi_cases.py    requests generated from the server's own OpenAPI document
grpc_messages.py    malformed gRPC messages
damage.py           almost valid trees and bytes
transfer_frames.py  malformed transfer frames
"""
