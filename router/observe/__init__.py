"""What operators see of the router.

timeline.py      one record per request
metrics.py       Prometheus series about requests
collectors.py    Prometheus series about workers, pools and queues
recent.py        the sequences of the last minute, for exact latencies and attainment
explanations.py  the latest decisions of mode adaptive, and what came of them
loop_lag.py      the series about delays of the event loop
fleet_use.py     how much of the workers is in use, for whoever scales the pools
"""
