"""The layers before vLLM's app, and uvicorn's limits below them. `layers` in `router/front/app.py` defines their order.

http_protocol.py     uvicorn's parser, with limits
anthropic_errors.py  gives errors of /v1/messages Anthropic's form
auth.py              checks API keys, names each client, and says which web pages may call
admin_access.py      decides who may use the operator's paths
ingress.py           limits what a request takes, and serves requests by turns
"""
