"""Clusters of hosts: namespaces of this machine, each with an sshd, on which `ray up` is run for real.

namespaces.py          the hosts: made, cut off, killed, removed
image.py               all that is not the real thing on them
ec2.py                 EC2 as moto emulates it, with a host for each instance
operators_shell.py     a shell, and the commands of docs/how-to/deploy.md that are typed into it
test_launch_faults.py  a launch that fails, a head that is lost
test_own_machines.py   deploy/cluster-onprem.yaml
test_ray_up.py         deploy/cluster.yaml: the page's commands, then what a cluster meets
"""
