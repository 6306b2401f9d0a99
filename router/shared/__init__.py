"""Several routers of one deployment, and the dispatcher that they share.

Each router serves HTTP and streams tokens by itself. What must hold for all of them together is decided in the
dispatcher: which prompt starts next, and on which workers. A request costs it a few small messages, a token none.

messages.py          what a router and the dispatcher tell each other
dispatcher.py        serves the routers: gives places, and sums up what they hold
link.py              a router's connection to the dispatcher, and what becomes of prompts without one
holdings.py          what a router must know of what the others have admitted, by differences
"""
