"""What `ridgeline doctor` checks, and every start before it.

checks.py         the checks, and their order
joined.py         a Ray cluster that is joined, and each of its machines
facts.py          this machine and this model as plain values
gpus.py           driver, memory and compiler of a GPU host
software.py       packages, kernel settings, TLS files, keys
model_support.py  whether a model can be served as configured
"""
