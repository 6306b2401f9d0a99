"""What the layers, the routes and the engine client share of HTTP; imports nothing else of the front.

types.py    the types of ASGI
context.py  the context of the request being served
errors.py   the body of every error
routes.py   every route, who may call it, and the answer to all other paths
"""
