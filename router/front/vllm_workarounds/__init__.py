"""What vLLM's API server app does otherwise than we need; `README.md` says what, why, and how to see that it can go.

app_gaps.py     answers of routes that would be wrong or missing
text_length.py  texts that are too long to be tokenised
unread.py       outputs that a client has not read yet
"""
