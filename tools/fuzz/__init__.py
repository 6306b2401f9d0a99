"""Sends malformed input to every port of Ridgeline.

run.py              the long run of all campaigns
campaigns.py        all campaigns, how one runs in seeded batches, and what must hold afterwards
server.py           the server under test, with fake engines
http_requests.py    malformed HTTP requests
grpc_messages.py    malformed gRPC messages
transfer_frames.py  malformed transfer frames
damage.py           almost valid trees and bytes
"""
