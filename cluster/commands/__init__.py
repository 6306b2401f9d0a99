"""The commands behind `cluster/cli.py`, one module each.

serve.py          `ridgeline serve`
replay.py         `ridgeline replay`
inspect_trace.py  `ridgeline trace inspect`
loadtest.py       `ridgeline compare` and `ridgeline report`
own_variants.py   the modes of an own deployment, for `compare`
setup.py          what they were run with, for their summaries
whatif.py         `ridgeline whatif` and `plan`
bench.py          `ridgeline bench transfer`
top.py            `ridgeline top`
operators.py      `ridgeline drain`, `mode`, `record`, `scale`, `restart`
decisions.py      `ridgeline decisions`
ended_request.py  `ridgeline trace ID`
"""
