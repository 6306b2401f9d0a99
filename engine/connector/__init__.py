"""vLLM's KV connector. The scheduler side decides, the worker side moves bytes; vLLM calls both through `kv_connector`.

kv_connector.py         vLLM's hooks
scheduler_side.py       decides what is published, fetched and released
worker_side.py          owns the transfer service
messages.py             the messages between the sides, one object a step
offers.py               what the prefix cache has, offered to engines that would compute it
chunks.py               which blocks of partial prompts are final
events.py               tells a handler about its hand-off
layout.py               what two engines must agree on to exchange KV
accounting.py           counts FLOPs, bytes and busy seconds of each step
step_cost.py            what a step of this model costs, by the formats of its weights and its KV
groups.py               which blocks of each group of layers a hand-off holds, in which order
transferable_models.py  whether a model can be served, before it loads
"""
