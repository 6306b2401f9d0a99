"""From rounds to a verdict: pure functions, each with the source of its formula.

attainment_curve.py  the attainment of a variant over the rate, the highest rate that it holds, which to measure next
verdict.py           which variants serve more of the same requests within the SLOs
"""
