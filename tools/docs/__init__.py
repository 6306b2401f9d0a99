"""Programs that write documents.

reference.py  docs/reference/settings.md and docs/reference/cli.md, from the code
"""
