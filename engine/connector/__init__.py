"""vLLM's KV connector. The scheduler side decides, the worker side moves bytes; vLLM calls both through `kv_connector`.

kv_connector.py         vLLM's hooks
scheduler_side.py       decides what is published, fetched and released, and offers what is cached
worker_side.py          owns the transfer service
messages.py             the messages between the sides, one object a step
chunks.py               which blocks of partial prompts are final
events.py               tells a handler about its hand-off
layout.py               what two engines must agree on to exchange KV
accounting.py           counts FLOPs, bytes and busy seconds of each step, by the formats of weights and KV
groups.py               which blocks of each group of layers a hand-off holds, in which order
transferable_models.py  whether a model can be served, before it loads
"""
