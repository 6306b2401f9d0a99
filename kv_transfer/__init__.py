"""The hand-off of KV blocks between engines: leases, transports, bytes. Imports neither Ray nor vLLM.

The prefill engine is the source, the decode engine fetches. Start with `contracts/handoff.py` (the nouns), then
`source/lease.py` (who holds what, how long), `interfaces.py` (what a transport is), `service.py` (the whole, running).

service.py     one engine's end of it all
interfaces.py  the parts of a transport, as abstract classes
transports.py  the transports by name, and how to build them
options.py     the settings of one engine, from the plan to the fetcher
names.py       the names and limits that settings use
source/        the prefill engine's end of a hand-off
fetch/         the decode engine's end of a hand-off
wire/          frames, codecs and gRPC methods
memory/        KV blocks as bytes, on host and device
collective/    the `collective` transport, experimental
nixl/          the `nixl` transport, experimental
testing/       a transport in memory, and deliberate faults
bench/         the measurement behind `ridgeline bench transfer`
"""
