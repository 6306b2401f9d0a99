"""What Ray does otherwise than we need; `README.md` says what, why, and how to see that it can go.

fewer_processes.py  Ray starts without what serves its dashboard and autoscaler
ray_messages.py     Ray's own messages go to a file
sigterm.py          an async actor decides what SIGTERM means
"""
