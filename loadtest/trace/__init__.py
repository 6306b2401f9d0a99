"""Traces: what arrives when, how long.

trace.py    arrivals and lengths
readers.py  one reader per format
shape.py    changes before a replay
prompts.py  token-exact prompts of real English
demo.py     writes the trace of `make demo`
"""
