"""Traces, open-loop replay, comparison of the two modes, report. Called by `ridgeline replay` and `ridgeline compare`.

Speaks only HTTP to the server, so the same code loads any OpenAI-compatible server.
"""
