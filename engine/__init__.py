"""One vLLM engine behind a small interface. With the router's front, the only importer of vLLM.

vllm_engine.py       runs AsyncLLM: tokens in, token deltas out
config.py            the configuration of one engine
passed_args.py       vLLM's own arguments that a configuration may set
speculation.py       which forms of speculation can be served
vllm_arguments.py    converts them to vLLM's types
adapter_files.py     LoRA adapters on disk: checks, identity, copies that nobody changes
grammars.py          bounds the size of grammars and chooses vLLM's backend for them
tag_grammars.py      structural tags as grammars of guidance
root_cause.py        why an engine could not load, or ended
stall.py             distinguishes a hung engine from an idle one, by what the kernel tells of its processes
request/             sampling and log-probabilities of a request's legs
step_scheduler.py    vLLM's scheduler, with the prompts in a step bounded by `ridgeline.decode_worker.pacing`
connector/           vLLM's KV connector: publishes, fetches and releases KV
worker_extension.py  reaches it from the front end: methods for vLLM's worker
vllm_workarounds/    workarounds for vLLM's behaviour
"""
