"""The decode role: admit, fetch KV, stream tokens; without a hand-off, a whole replica.

handler.py  runs the decode leg of a request
"""
