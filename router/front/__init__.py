"""All code that knows HTTP or vLLM's API server app.

app.py             builds vLLM's app with our routes, behind the layers
http/              what all of this package shares of HTTP
middleware/        the layers before the app
engine_client.py   vLLM's EngineClient: one request in, outputs out
sampling.py        sampling parameters as dispatch carries them
text_stream.py     turns deltas into text
text_turns.py      streams take turns in that
request_fields.py  says how each field of a body is treated
strict.py          enforces `strict: true`, or refuses it
health.py          GET /ready
admin.py           /ridgeline/*, the operator's paths
operations.py      operators' requests for more workers, fewer, or a restart of all
metrics_page.py    GET /metrics, with the request series of all routers
page/              GET /, the live page
single_flight.py   shares one computation among concurrent callers
vllm_workarounds/  workarounds for vLLM's app
"""
