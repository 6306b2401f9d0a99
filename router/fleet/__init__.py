"""The workers that this router is connected to.

worker.py         one worker: its status, and what is outstanding there
fleet.py          all workers
adapters.py       which LoRA adapters all workers have
roles.py          which worker is for what, in each mode
pairing.py        which workers can exchange KV
request_route.py  which way a request goes through the pools of a mode
prefixes.py       which worker has the beginning of a prompt
"""
