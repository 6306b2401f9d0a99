"""The hand-off of KV blocks between engines: transports, bytes, and both ends joined. Imports neither Ray nor vLLM.

The prefill engine's end is `prefill_worker/kv_source`, the decode engine's end `decode_worker/kv_fetch`; every engine
runs both. Start with `contracts/handoff.py` (the nouns), then `interfaces.py` (what a transport is) and `service.py`.

service.py     one engine's end of it all
interfaces.py  what a transport is
transports.py  the transports by name, and how to build them
options.py     the settings of one engine, from the plan to the fetcher
names.py       the names and limits that settings use
control.py     describe, renew and release over gRPC
faults.py      fetches that fail on purpose
wire/          frames and gRPC methods
memory/        KV blocks as bytes, on host and device
collective/    the `collective` transport, experimental
nixl/          the `nixl` transport, experimental
measure.py     the measurement behind `ridgeline bench transfer`
"""
