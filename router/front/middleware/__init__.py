"""The layers before vLLM's app, and uvicorn's limits below them. `layers` in `router/front/app.py` defines their order.

http_protocol.py     uvicorn's parser, with limits
request_ids.py       names every request in its answer
anthropic_errors.py  gives errors of /v1/messages Anthropic's form
head_requests.py     answers HEAD as GET
auth.py              checks API keys and names each client
body_limit.py        limits the length of bodies
admin_access.py      decides who may use the operator's paths
cors.py              decides which web pages may call
time_limits.py       reads the times that a client allows
retry_after.py       adds the Retry-After header
json_cost.py         limits the work that a body causes
fair_order.py        refuses early, and takes requests in by turns
"""
