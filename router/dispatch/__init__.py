"""One request from its admission to its outcome.

request.py       what was asked for, and what the client has so far
orchestrator.py  deadline, attempts and outcome, and the release of hand-offs that nobody fetches
legs.py          the legs of one attempt
modes.py         changes the mode while requests are served
"""
