"""Checks for a machine with one CUDA GPU, in minutes, with torch, numpy and msgspec alone.

`first_run.sh` is for a machine with vLLM and two of them.

check.py         runs all of it, prints a table, writes JSON
result.py        the rows of that table
machine.py       the device, its clock, and the sizes of a dry run
blocks.py        gathering and scattering blocks of real cache shapes, bit for bit
ipc.py           a second process that copies blocks out of the first one's cache, by CUDA IPC
peaks.py         peak FLOP/s and bandwidth, against roofline/hardware.py
answers.py       records a server's greedy answers or plain vLLM's, and compares two recordings
"""
