"""What `cluster.runtime.supervisor` decides by: who is partitioned, who knows a new worker, when to try again.

reach.py           which workers, or which routers, are partitioned: what most routers reach is alive
registration.py    makes a worker known to all routers, at the same time
restart_budget.py  how soon something that died is started again
"""
