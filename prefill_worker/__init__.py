"""The prefill role: run the prompt, publish its KV, return the first token.

handler.py  runs the prefill leg of a request
kv_source/  leases the prompt's KV blocks and serves them to decode workers
"""
