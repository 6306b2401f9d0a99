"""Reads the files that hold traces. A format is known by a file's content, never by its name.

trace_file.py      opens a file: compression, encoding, ends of lines
known_formats.py   recognises the format, and reads with its reader
csv_columns.py     reads CSV: Azure, BurstGPT
times.py           reads times: with zones, without, or as numbers
json_requests.py   reads JSON lines with lengths: Mooncake, Bailian, sessions
json_documents.py  reads JSON objects that may span lines
sharegpt.py        reads conversations that hold texts
agent_traces.py    reads WEKA's agentic traces
otel_spans.py      reads OpenTelemetry's spans of LLM calls
request_table.py   checks what was read: drops and counts, sorts, numbers hashes
"""
