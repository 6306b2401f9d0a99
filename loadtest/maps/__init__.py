"""Maps over limits of TTFT and TPOT: what others would have said of the same requests.

grid.py        the limits of a map
winner_map.py  says which arm meets which limits for more requests
rate_map.py    says which arm holds the highest rate within which limits
"""
