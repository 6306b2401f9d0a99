"""Everything that knows HTTP or vLLM's API server app.

app.py             vLLM's app, our paths, and the layers before them, in order
context.py         what is known of the request being served
errors.py          the one body of every error
middleware/        what stands before the app
engine_client.py   vLLM's EngineClient: one request in, outputs out
sampling.py        sampling parameters as dispatch carries them
text_stream.py     deltas to text
request_fields.py  what becomes of each field of a body
routes.py          every path, and who may call it
health.py          GET /ready
admin.py           /ridgeline/*, the operator's paths
metrics_page.py    GET /metrics
shared_answer.py   one costly answer for many callers
vllm_workarounds/  what vLLM's app does otherwise than we need
"""
