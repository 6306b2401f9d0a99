"""What operators see.

timeline.py  one record per request
metrics.py   every Prometheus series but one
loop_lag.py  that one: how late the event loop is
"""
