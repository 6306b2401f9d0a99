"""The results of a run: figures with their formulas, a verdict in words, a page.

summary.py        computes figures under vLLM bench's names
rounds.py         the rounds of a comparison, and what summary.json says of each
comparison.py     makes summary.json of a comparison
wording.py        says the verdict in sentences
pools.py          computes intensity, MFU and MBU of each pool
tables.py         prints tables on the terminal
plots.py          makes the plots of the page
page.py           writes report.html
record_table.py   writes records.parquet
replay_output.py  writes and prints the result of `ridgeline replay`
"""
