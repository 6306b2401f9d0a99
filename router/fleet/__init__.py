"""The workers of this router.

worker.py   one worker: status, and what is outstanding there
fleet.py    all of them
pairing.py  who can hand KV to whom
policy.py   which one gets a request
"""
