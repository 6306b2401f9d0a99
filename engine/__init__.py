"""One vLLM engine behind a small interface, and what every worker shares.

This package is the only importer of vLLM's engine and connector classes. `prefill_worker/` and `decode_worker/` build
on it; the router uses its messages and its data-plane client.

    messages.py             what travels between router and worker
    data_plane.py           gRPC: methods, codecs, the router's WorkerClient
    host.py                 the worker's side of it: life cycle, sessions, cancel, drain, status
    vllm_engine.py          AsyncLLM: tokens in, token deltas out
    sampling.py             SamplingParams of the two legs of one request
    logprobs.py             vLLM's logprobs to and from the wire
    connector.py            vLLM's KV connector; connector_scheduler.py decides, connector_worker.py moves bytes
    accounting.py           FLOPs, bytes and busy seconds of each engine step
"""
