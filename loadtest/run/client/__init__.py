"""The load generator: a process of its own that sends requests at their times.

driver.py   starts the process and takes the records back
process.py  sends requests at their time, whatever the server does
stream.py   sends one streamed completion and times it
"""
