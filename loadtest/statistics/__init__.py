"""From pairs of rounds to an outcome: pure functions, each with the source of its formula.

pairs.py         what one pair of rounds says: the difference of attainment, log ratios of goodput and latencies
student.py       the t distribution
proportions.py   the score interval of two paired shares
paired_tests.py  the t interval over pairs, the exact sign-flip test, Holm's correction
looks.py         after how many pairs one looks, and how much error each look may spend
outcome.py       better, equivalent, inconclusive or slo_unreachable, and what is said of the latencies
"""
