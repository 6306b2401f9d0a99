"""The results of a run: figures with their formulas, an outcome in words, a page.

summary.py        computes figures under vLLM bench's names
rounds.py         makes summary.json of a comparison
rates.py          makes summary.json of a comparison over rates
rates_page.py     shows it as a table and a page
wording.py        says the outcome in sentences
pools.py          computes intensity, MFU and MBU of each pool, and figures per core or GPU with cost
tables.py         prints tables on the terminal
plots.py          makes the plots of the page
page.py           writes report.html
record_table.py   writes records.parquet
replay_output.py  writes and prints the result of `ridgeline replay`
"""
