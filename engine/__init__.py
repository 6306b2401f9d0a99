"""One vLLM engine behind a small interface. With the router's front, the only importer of vLLM.

vllm_engine.py     AsyncLLM: tokens in, token deltas out
config.py          what one engine needs to know
passed_args.py     vLLM's own arguments that a configuration may set
vllm_arguments.py  gives them vLLM's types
stall.py           tells an engine that stands still from one that is idle
request/           sampling and log-probabilities of one request's legs
connector/         vLLM's KV connector: what is published, fetched, released
vllm_workarounds/  what vLLM does otherwise than we need
"""
