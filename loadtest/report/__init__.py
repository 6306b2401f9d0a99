"""The results of a run: figures with their formulas, a verdict, a page.

summary.py        computes figures under vLLM bench's names
bootstrap.py      computes confidence intervals
verdict.py        decides which mode won, and how surely
pools.py          computes intensity, MFU and MBU of each pool
tables.py         prints tables on the terminal
plots.py          makes the plots of the page
page.py           writes report.html
replay_output.py  writes and prints the result of `ridgeline replay`
"""
