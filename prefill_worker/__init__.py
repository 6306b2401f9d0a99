"""The prefill role: run the prompt, publish its KV, hand back the first token.

handler.py  runs the prefill leg of a request
"""
