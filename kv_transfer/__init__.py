"""The hand-off of KV blocks between engines: protocol, leases, transports. Imports neither Ray nor vLLM.

`engine` owns one `service.TransferService` per engine process; everything else here serves that. Start with `handoff`
(the nouns), then `lease` (who holds what, how long), `base` (what a transport is), `service` (the whole, running).
"""
