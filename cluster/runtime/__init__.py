"""What runs on Ray, from the plan to the supervisor.

plan.py            engine and router settings, made from the configuration
roles.py           each worker's role in each mode, or why the mode cannot change
deployment.py      starts workers and routers, and takes them down
ray_start.py       starts Ray itself, or joins it
actors.py          the Ray actors
services.py        what runs in the processes behind them: workers, routers, the dispatcher
service_process/   those processes: how they start, and calls to them
handlers.py        which handler runs which leg
handles/           actors by name, whichever process fills them
supervisor.py      brings back what dies
registration.py    makes a worker known to all routers, at the same time
fleet_operations.py  operations of the routers, one at a time: more workers, fewer, all started again
autoscale/         begins operations when the load asks for them
processes.py       processes of a node and their end
environment.py     variables of a shell that must not reach a server
ray_workarounds/   what Ray does otherwise than we need
"""
