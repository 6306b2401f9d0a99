"""Maps over SLOs on TTFT and TPOT: what others would have said of the same requests.

grid.py        the limits of a map
winner_map.py  says which variant meets which SLOs for more requests
rate_map.py    says which variant holds the maximum goodput rate within which SLOs
"""
