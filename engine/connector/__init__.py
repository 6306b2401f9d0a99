"""vLLM's KV connector. The scheduler side decides, the worker side moves bytes; vLLM calls `facade` with both.

facade.py               vLLM's hooks
scheduler_side.py       what is published, fetched and released
worker_side.py          owns the transfer service
messages.py             one object a step between the sides
chunks.py               which blocks of growing prompts are final
events.py               what a handler is told beside the tokens
accounting.py           FLOPs, bytes and busy seconds of each step
transferable_cache.py   whether a KV cache can be handed over
transferable_models.py  whether a model's can, before it loads
"""
