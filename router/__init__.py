"""The HTTP front end and the way of a request through the workers. Run by `cluster.actors.RouterActor`.

app.py            vLLM's API server app on our engine client, served by uvicorn
engine_client.py  vLLM's EngineClient: one request in, RequestOutputs out
orchestrator.py   prefill, hand-off, decode: who runs what, what is released when
policy.py         which worker: filter, score, pick
fleet.py          the connected workers, their load, pairing
timeline.py       one record per request that joins both legs
metrics.py        every Prometheus series
"""
