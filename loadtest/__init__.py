"""Traces, open-loop replay, comparison of variants, and the report.

It speaks only HTTP to the server, so the same code can load any OpenAI-compatible server.

plan.py            the settings of a run, checked before anything starts
variants.py        the variants of a comparison, and the ways to reach one
running_server.py  a variant that somebody else runs
preparation.py     measures rate, SLOs and requests before the first round
valid_rounds.py    runs rounds of variants until they are valid
run_folder.py      the folder of a comparison while it runs
compare.py         measures variants at one rate or more, and judges them
trace/             what is replayed: arrivals, lengths, prompts
run/               one replay, from the plan to the records
statistics/        from rounds to a verdict
slo_map.py         what other SLOs would have said of the same requests
saved.py           shows a run again from its folder
report/            figures, sentences and page
export.py          rounds in the format of `vllm bench serve`
errors.py          errors whose messages the command line prints
"""
