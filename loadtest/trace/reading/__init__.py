"""Reads the files that hold traces. A format is known by a file's content, never by its name.

trace_file.py          opens a file: lines, objects of JSON, gzip
known_formats.py       recognises the format, and reads with its reader
csv_columns.py         reads CSV: Azure, BurstGPT
json_requests.py       reads JSON lines with lengths: Mooncake, Bailian, sessions
sharegpt.py            reads conversations that hold texts
agent_traces.py        reads WEKA's agentic traces
conversation_trees.py  reads AIPerf's conversations that begin others
request_table.py       checks what was read: drops and counts, sorts, numbers hashes
"""
