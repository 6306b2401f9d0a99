"""Traces: when requests arrive and how long they are.

trace.py       the data types
readers.py     reads the trace that a name means
reading/       reads files, each format by its content
generated.py   generates requests of one size, and sessions of agents
inspection.py  describes a trace before anything is sent
shape.py       changes a trace before a replay
windows.py     gives each pair of rounds its requests
prompts.py     makes token-exact prompts of real English
"""
