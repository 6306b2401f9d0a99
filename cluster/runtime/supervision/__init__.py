"""What `cluster.runtime.supervisor` decides by: who knows a new worker, when to try again.

registration.py    makes a worker known to all routers, at the same time
restart_budget.py  how soon something that died is started again
"""
