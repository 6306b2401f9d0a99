"""From rounds to a verdict: pure functions, each with the source of its formula.

attainment_curve.py  the attainment of a variant over the rate, and the highest rate that it holds
next_rate.py         which rate is measured next
verdict.py           which variants serve more of the same requests within the SLOs
"""
