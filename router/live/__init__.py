"""What the live page shows, made of what the router knows.

state.py    what a state holds: the contract with the page
samples.py  what workers and requests have counted, and what grew between two samples
advice.py   the sentence, what would help, and how much of each resource is in use
view.py     takes samples, and makes a state for whoever looks
"""
