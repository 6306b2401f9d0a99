"""One replay, from the plan to the records.

unloaded.py        measures what an idle server takes for a request and for a step
calibration.py     chooses rate, SLOs and number of requests from that
warm_up.py         warms up every worker of a server that has just started
replay.py          replays a trace: requests at their time, the server's counters before and after
client/            sends the requests, in a process of its own
server.py          asks the server for its models
records.py         the record of each request
progress.py        shows the progress
server_metrics.py  computes differences of the server's counters, and the levels of its gauges
server_facts.py    asks servers for the settings of their engines, and says in what these differ
machine.py         describes the machine of the run and notices other work on it
quantities.py      says counts and times for people
"""
