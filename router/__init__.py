"""The way of a request: HTTP in, through the queues, to the workers, tokens out. Run by `cluster.runtime.actors`.

A request passes the folders in this order.

server.py           builds all of it and runs it
front/              HTTP, vLLM's API server app, the paths
dispatch/           one request: its legs, its retries, its end
flow/               who may start: admission, queues, rates
fleet/              the workers: load, pairing, choice
observe/            timelines and metrics
settings.py         what the router needs to know
client_identity.py  who sent the request being served
"""
