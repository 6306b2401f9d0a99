"""What watches the traffic: comparisons of policies in mode `adaptive`, and recordings.

comparing.py  has mode adaptive compare policies, a little at a time beside everything else
recording.py  streams what happens to the scheduler to somebody who records it
"""
