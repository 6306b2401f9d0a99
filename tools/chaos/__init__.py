"""Real deployments under load and faults: two programs, and the parts they share.

chaos.py       kills, stops and cuts off workers: is anything lost
stress.py      checks whether anything stays behind when clients leave
running.py     starts a deployment, with a client and a text to cut prompts from
deployment.py  observes a deployment as an operator would
drive.py       runs clients
wishes.py      plans the clients' requests
faults.py      injects faults into processes, in a seeded order
operations.py  changes the mode, gives the deployment more workers and fewer, restarts all
records.py     one request as its client saw it
verify.py      checks what must hold for every answer
"""
