"""Three modes on one running fleet: `make bench-modes`.

__main__.py  the command line
settings.py  what a run was asked for
journal.py   what has been measured so far, written at once, read when a run is resumed
fleet.py     the deployment, and one round of a mode on it
cells.py     makes a cell of the map of its rounds, and says which rate is worth the next round
map.py       the first part: goodput of each mode over limits of TTFT and TPOT, for three workloads
shift.py     the second part: a load that turns from prefill-heavy to decode-heavy and back
"""
