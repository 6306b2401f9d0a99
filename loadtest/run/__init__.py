"""One replay, from the plan to the records.

plan.py            the settings of a run, checked before anything starts
replay.py          sends requests at their time, whatever the server does
client.py          sends one streamed completion and times it
records.py         the record of each request
progress.py        shows the progress
server_metrics.py  computes differences of the server's counters
machine.py         describes the machine of the run
"""
