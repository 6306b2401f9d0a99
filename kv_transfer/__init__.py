"""The hand-off of KV blocks between engines: leases, transports, bytes. Imports neither Ray nor vLLM.

The prefill engine is the source, the decode engine fetches. Start with `contracts/handoff.py` (the nouns), then
`source/lease.py` (who holds what, how long), `interfaces.py` (what a transport is), `service.py` (the whole, running).

service.py     one engine's end of it all
interfaces.py  what a transport is made of
transports.py  which there are, by name
names.py       names and limits that settings use
source/        the prefill engine's end
fetch/         the decode engine's end
wire/          frames, codecs, gRPC methods
memory/        KV blocks as bytes, on host and device
collective/    the `collective` transport, experimental
testing/       a transport in memory, and faults on purpose
bench/         `ridgeline bench transfer`
"""
