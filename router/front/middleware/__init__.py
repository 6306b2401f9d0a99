"""The layers before vLLM's app, and uvicorn's limits under them. `layers` in `router/front/app.py` is their order.

types.py          ASGI's types
http_protocol.py  uvicorn's parser with limits
auth.py           API keys, and what each client is called
body_limit.py     the longest body
admin_access.py   who may use operators' paths
cors.py           which web pages may call
deadline.py       how long a client gives
retry_after.py    when to come again
json_cost.py      how much work a body is
fair_order.py     refuses early, and lets in by turns
"""
