"""Sends the same requests to Ridgeline and to plain vLLM, whose answers must be the same.

run.py      sends random requests to both
cases.py    makes the random requests
compare.py  finds where two answers differ
plain.py    runs vLLM's own server as a process
worker.py   changes plain vLLM so that it survives on a CPU
"""
