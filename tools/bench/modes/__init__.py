"""The map of three modes over limits of TTFT and TPOT, on one running fleet: `make bench-modes`.

__main__.py   the command line
settings.py   what a run was asked for
workloads.py  the requests of each workload
journal.py    what has been measured so far, written at once, read when a run is resumed
budget.py     divides the time among rounds
rates.py      which rates are worth a round
fleet.py      the deployment, and one round of a mode on it
course.py     runs the rounds of one workload
cells.py      makes a cell of the map of its rounds
picture.py    draws the map of one workload
summary.py    writes summary.json and the pictures, prints the table
shift.py      the second part: a load that turns from prefill-heavy to decode-heavy and back
"""
