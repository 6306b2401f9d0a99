"""Ray actors by name, whichever process fills them. What runs in that process is in `cluster.runtime.services`.

actor.py    what all handles have in common: place, process, calls, end
worker.py   a worker
routing.py  the routers, and the dispatcher that several of them share
"""
