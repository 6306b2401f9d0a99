"""The router: takes HTTP requests, queues them, sends them to workers, returns tokens.

A request passes through these packages in this order.

server.py           builds the parts and runs them
router_control.py   what the driver calls of a router or the dispatcher
decisions.py        what decides: this router, or the dispatcher that it shares with others
front/              HTTP, vLLM's API server app, the routes
dispatch/           one request: its legs, its retries, its outcome
watching.py         comparisons of policies, and recordings
live/               the state of the live page
placement/          when a prompt starts, and on which workers
flow/               admission, fair queues and rates: which request is accepted, and whose turn it is
scheduler/          policies of mode adaptive, and the simulation that chooses among them
fleet/              the workers: load, pairing, choice of a worker
observe/            timelines and metrics
shared/             several routers: the dispatcher, and the way to it
idle_times.py       says which limits of router.slo an idle server cannot keep
gc_schedule.py      when Python looks for cyclic garbage
settings.py         the router's configuration
client_identity.py  names clients by key or address
"""
