"""Traces: when requests arrive and how long they are.

trace.py            the data types
readers.py          reads the trace that a name means
reading/            reads files, each format by its content
poisson.py          generates requests of one size
inspection.py       describes a trace before anything is sent
inspection_text.py  says that in words
shape.py            changes a trace before a replay
windows.py          gives each pair of rounds its requests
prompts.py          makes token-exact prompts of real English
demo.py             writes the trace of `make demo`
"""
