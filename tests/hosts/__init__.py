"""A cluster of hosts: network namespaces of this machine, each with an sshd, on which `ray up` is run for real.

namespaces.py    the hosts: made, cut off, killed, removed
cluster_file.py  deploy/cluster-onprem.yaml with the addresses and roles of these hosts, and what is served there
one_engine.py    what one plain engine answers to the same prompts
test_ray_up.py   the commands of docs/how-to/deploy.md, then faults of hosts
"""
