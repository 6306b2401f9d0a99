"""One request from its admission to its one outcome.

request.py       what was asked, and what its client has
orchestrator.py  deadline, attempts, outcome
legs.py          the legs of one attempt
releaser.py      gives back hand-offs that nobody will fetch
"""
