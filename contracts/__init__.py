"""What travels between processes. Start reading here: msgspec structs and the standard library, no engine, no Ray.

vocabulary.py  pools, legs, health: the words that everything shares
tasks.py       one leg of a request, and what comes back
workers.py     who a worker is, how it is, and the calls that are not tasks
handoff.py     layouts, hand-offs and results of KV blocks
errors.py      every error that crosses a process
section.py     what all sections of the configuration have in common (pydantic)
log_lines.py   how every process logs: format, levels, fields
rpc/           addresses, channels, TLS
"""
