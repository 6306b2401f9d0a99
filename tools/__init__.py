"""Programs for developers of Ridgeline; the product imports none of them.

bench/            measurements in addition to those of `ridgeline bench`
boards.py         writes the boards of deploy/grafana/
changed_tests.py  the unit tests of what was changed, for `make check`
chart.py          writes deploy/kuberay.yaml from the chart
child.py          a server in a process of its own
chaos/            faults under load: what is lost, what stays behind
demo_trace.py     writes the trace of `make demo`
differential/     random requests to Ridgeline and to plain vLLM, compared
docs/             programs that write documents
front/            what the router can carry, with workers that need no engine
fuzz/             malformed requests, messages and frames
gpu/              what a machine with one GPU can prove in minutes, with torch alone
"""
