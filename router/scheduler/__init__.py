"""Which workers a request gets: state, policies, and the simulation that mode `adaptive` chooses among policies by.

features.py            what a request asks, what a policy knows of a worker and answers
policies.py            colocated, disaggregated, threshold, slack, by name; `Policy` is the plug-in point
engines.py             engines as a model has them: steps, chunked prefill, pacing, shared devices
simulation.py          serves requests by a policy on modelled engines, thousands a second
traffic.py             remembers the latest requests
adaptive.py            serves as the policy that would have served the latest requests best
recorded_events.py     the lines of a recording
replay.py              makes the decisions of a recording again
offline_simulation.py  serves recorded requests otherwise, and finds how many workers keep their SLOs
sizing.py              how many workers of each pool keep the SLOs of the latest requests

All of it is pure: no I/O, no asyncio, and clocks are passed in.
"""
