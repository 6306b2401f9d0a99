"""What operators see of the router.

timeline.py        one record per request
metrics.py         Prometheus series about requests
collectors.py      Prometheus series about workers, pools and queues
ended_requests.py  the latest sequences: stages, hand-off, and the decision that placed each
tracing.py         their spans, for a collector of OpenTelemetry
loop_lag.py        the series about delays of the event loop
"""
