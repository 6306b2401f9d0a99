"""From rounds to an outcome: pure functions, each with the source of its formula.

attainment_curve.py  the attainment of a variant over the rate, and the highest rate that it holds
next_rate.py         which rate is measured next
rate_verdict.py      which variant holds the highest rate, and how strong the evidence is
pairs.py             what one pair of rounds says: the difference of attainment, log ratios of goodput and latencies
proportions.py       the score interval of two paired shares
paired_tests.py      the t interval over pairs, the exact sign-flip test, Holm's correction
student.py           Student's t distribution
looks.py             after how many pairs one looks, and how much error each look may spend
outcome.py           better, equivalent, inconclusive or slo_unreachable, and what is said of the latencies
"""
