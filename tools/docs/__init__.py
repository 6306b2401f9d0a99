"""Programs that write documents.

measurements.py  docs/measurements.md, from the figures in docs/results/
reference.py     docs/reference/settings.md and docs/reference/cli.md, from the code
site.py          hooks of mkdocs.yml: links to code, names of headings, folders in the nav
"""
