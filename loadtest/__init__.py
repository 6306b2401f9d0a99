"""Traces, open-loop replay, comparison of the two modes, report. Called by `cluster.commands.loadtest`.

Speaks only HTTP to the server, so the same code loads any OpenAI-compatible server.

compare.py  both modes on the same requests, in rounds
trace/      what is replayed
run/        one replay
report/     what came of it
errors.py   sentences for the person at the terminal
"""
