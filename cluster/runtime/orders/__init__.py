"""Carries out what operators order at a router: more workers, fewer, or all of them started again one by one.

The supervisor watches what is started here.

desk.py      takes orders from all routers, has one at a time carried out or cancelled, and tells all how they go on
carrying.py  what scaling and restarting consist of
"""
