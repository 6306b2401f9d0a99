"""The same requests to Ridgeline and to plain vLLM: both must answer the same.

run.py      random requests to both
scored.py   prompts whose log-probabilities are asked for
cases.py    makes the random requests
compare.py  says where two answers differ
plain.py    vLLM's own server as a process
worker.py   what must be changed in plain vLLM so that it survives on a CPU
"""
