"""The decode role: admit, fetch KV, stream tokens; without a hand-off, a whole replica.

handler.py  runs the decode leg of a request
kv_fetch/   fetches a prompt's KV blocks from the prefill worker
pacing/     bounds the prompts in a step, by a fitted model of the time it takes
"""
