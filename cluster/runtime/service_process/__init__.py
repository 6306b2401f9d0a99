"""The process behind an actor: where a worker or the router really runs.

A Ray actor's process has threads, and has imported nothing of vLLM, whose import costs seconds of CPU time. So an actor
only asks: the service runs in a process of its own, forked from a parent that has imported everything and has no
threads. Its engine is forked from it in turn. Without such a parent the process is started afresh.

calls.py   calls over a socket: the actor's side and the service's
child.py   what the new process does: take over the environment, make the service; the parent that forks it
launch.py  gets a process: from a preloaded parent, or a fresh one
"""
