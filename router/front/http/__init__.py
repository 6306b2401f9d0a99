"""What the layers, the routes and the engine client share of HTTP; imports nothing else of the front.

types.py          the types of ASGI
context.py        the context of the request being served
errors.py         the body of every error
routes.py         every route, and who may call it
unknown_paths.py  the answer to all other paths
"""
