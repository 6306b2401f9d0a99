"""The workers that this router is connected to.

worker.py      one worker: its status, and what is outstanding there
fleet.py       all workers
roles.py       which worker is for what, in each mode
pairing.py     which workers can exchange KV
policy.py      which path and which worker a request gets
adaptive.py    the same in mode adaptive: predicts, then chooses
prediction.py  what a prompt or an answer would take on a worker
corrections.py  how much longer prompts take than that
short_list.py  which workers are worth a prediction
rebalance.py   when workers of mode adaptive come to favour a phase
shape.py       what rate a fleet holds if they do
prefixes.py    which worker has the beginning of a prompt
"""
