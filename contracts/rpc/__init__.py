"""The plumbing under every gRPC call between processes of Ridgeline.

address.py  hosts, ports and URLs as text
channel.py  every port and channel is made here
tls.py      the certificates, and whether peers would accept each other
"""
