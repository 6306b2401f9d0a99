"""Traces, open-loop replay, comparison of two variants, and the report.

It speaks only HTTP to the server, so the same code can load any OpenAI-compatible server.

plan.py          the settings of a run, checked before anything starts
variants.py      the variants of a comparison, and the ways to reach one
baseline.py      a variant that somebody else runs
preparation.py   measures rate, SLOs and requests before the first round
tuning.py        runs the candidates of both variants before the pairs that are judged
valid_rounds.py  runs rounds of variants until they are valid
run_folder.py    the folder of a comparison while it runs
compare.py       judges pairs of rounds until the variants can be told apart or cannot
find_rate.py     measures variants over rates until the highest one that each holds is known
trace/           what is replayed: arrivals, lengths, prompts
run/             one replay, from the plan to the records
statistics/      from pairs of rounds to an outcome
slo_maps.py      what other SLOs would have said of the same requests
saved.py         shows runs again from their folders
report/          figures, sentences and page
export/          rounds in the format of another load generator
errors.py        errors whose messages the command line prints
"""
