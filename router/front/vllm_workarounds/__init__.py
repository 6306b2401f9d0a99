"""Workarounds for vLLM's API server app; `README.md` says what each one is for and how to see that it can go.

app_gaps.py       corrects answers of routes that would be wrong or missing
bodies.py         reads bodies as clients write them, bounds their texts, and tells what is wrong with one
messages.py       corrects /v1/messages
responses.py      refuses streams of /v1/responses before they begin, and says what the limit cut off
stream_chunks.py  encodes the chunks of streams without pydantic
unread.py         counts outputs that clients have not read
whole_calls.py    tells a tool call when its text is whole, or not at all
"""
