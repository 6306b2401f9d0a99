"""What `cluster.runtime.supervisor` decides by: who is cut off, who knows a new worker, when to try again.

reach.py           which workers, or which heads, are cut off: what most heads reach is alive
introduction.py    makes a worker known to all heads, at the same time
restart_budget.py  how soon something that died is started again
"""
