"""One replay, from the plan to the records.

plan.py            what to run, checked before anything starts
replay.py          requests leave at their time, whatever the server does
client.py          one streamed completion, timed
records.py         what is kept of each request
progress.py        how it is going
server_metrics.py  differences of the server's counters
machine.py         what it ran on
"""
