"""The decode role: admit, fetch KV, stream tokens; without a hand-off, a whole replica.

Used by `cluster.runtime.handlers`.

handler.py  runs the decode leg of a request
"""
