"""Workarounds for vLLM's API server app; `README.md` says what each one is for and how to see that it can go.

app_gaps.py       corrects answers of routes that would be wrong or missing
bodies.py         reads bodies as clients write them, and tells in a sentence what is wrong with one
keep_alive.py     sends comments in silent streams of two more routes
left_streams.py   frees the requests of clients that have left
messages.py       corrects /v1/messages
model_card.py     answers GET /v1/models/{model}
no_processor.py   saves vLLM the search for a second chat template
responses.py      refuses streams of /v1/responses before they begin, and says what the limit cut off
stream_chunks.py  encodes the chunks of streams without pydantic
text_length.py    refuses texts that are too long to tokenise
unread.py         limits outputs that clients have not read
whole_calls.py    tells a tool call when its text is whole, or not at all
"""
