"""How long the engine's steps take, and how many prompt tokens a step may compute so that it does not take too long.

`ridgeline.engine.step_scheduler` bounds vLLM's scheduler by these.

model.py    from when to when a step lasts, and the fit of that time to what the step computes
bound.py    the longest chunks of prompts that fit a time
slack.py    the TPOT slack of single sequences
"""
