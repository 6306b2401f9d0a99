"""The commands behind `cluster/cli.py`, one module each.

serve.py          `ridgeline serve`
replay.py         `ridgeline replay`
inspect_trace.py  `ridgeline trace inspect`
loadtest.py       `ridgeline compare`
own_variants.py   the modes of an own deployment that it compares
plan_options.py   the options of `replay` and `compare`
setup.py          what they were run with, for their summaries
whatif.py         `ridgeline whatif`
bench.py          `ridgeline bench transfer`
roofline.py       `ridgeline roofline`
top.py            `ridgeline top`
operators/        `ridgeline drain`, `mode`, `decisions`, `record`, `scale`, `restart`
server_url.py     the option that names a running server
"""
