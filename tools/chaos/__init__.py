"""Real deployments under load while something happens to them. Four programs, and what they share.

chaos.py        workers are killed, stopped and cut off: is anything lost
kill_decode.py  a decode worker is killed in the middle of its streams
soak.py         does memory grow with requests
stress.py       does anything stay behind when clients leave
running.py      a deployment, a client and a text to cut prompts from
deployment.py   a deployment as an operator sees it
drive.py        clients at work
wishes.py       what clients ask for
faults.py       what is done to processes, and in which order
records.py      one request as its client saw it
verify.py       what must hold for every answer
scoring.py      how far each token is from the best one
memory.py       memory of each part of a deployment
"""
