"""What came of a run: figures with their formulas, a verdict, a page.

summary.py        figures under vLLM bench's names
bootstrap.py      how far a figure would move with other requests
verdict.py        which mode won, how surely
pools.py          intensity, MFU and MBU of each pool
tables.py         for the terminal
plots.py          for the page
page.py           report.html
replay_output.py  what `ridgeline replay` writes and prints
"""
