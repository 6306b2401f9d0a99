"""Traces: when requests arrive and how long they are.

trace.py          the data types
readers.py        reads each format
conversations.py  reads sessions and ShareGPT
shape.py          changes a trace before a replay
windows.py        gives each pair of rounds its requests
prompts.py        makes token-exact prompts of real English
demo.py           writes the trace of `make demo`
"""
