"""What the operator sees of a launch that fails, and of a head that is lost; no engine is started."""

from __future__ import annotations

import re
import time

import pytest

from tests.engines.harness import Figure
from tests.hosts.conftest import wait_until
from tests.hosts.ec2 import Ec2
from tests.hosts.operators_shell import OperatorsShell, documented

pytestmark = pytest.mark.hosts

UP = documented("AWS", "ray up")
TOKEN = documented("AWS", "ray get-auth-token")
SOON_S = 60.0
NODES_WITHIN_S = 120.0


def last_lines(text: str) -> str:
    """The end of what was printed, without colours and the times of a log."""
    plain = re.sub(r"\x1b\[[0-9;]*m|^[-\d]+ [\d:,]+\s+\w+ [\w.]+:\d+ -- ", "", text, flags=re.MULTILINE)
    return plain[-1500:]


def test_an_aws_key_that_is_wrong_is_named_before_anything_is_launched(shell: OperatorsShell, ec2: Ec2):
    shell.run(TOKEN)
    told = last_lines(shell.run(UP, fails=True, within_s=SOON_S, AWS_ACCESS_KEY_ID="AKIDWRONG"))
    assert "AuthFailure" in told or "AWS was not able to validate the provided access credentials" in told
    assert ec2.instances() == []


def test_without_rays_token_the_file_that_is_missing_is_named_though_after_the_head_was_launched(
    shell: OperatorsShell, ec2: Ec2
):
    ec2.locked.add("head")
    token = shell.home / ".ray/auth_token"
    kept = token.read_text()
    token.unlink()
    told = last_lines(shell.run(UP, fails=True, within_s=SOON_S))
    assert re.search(rf"(FileNotFound|Assertion)Error.*{token}", told)
    token.write_text(kept)
    assert len(ec2.running("head")) == 1


def test_a_head_that_refuses_the_key_is_told_every_few_seconds_and_the_launch_goes_on_once_it_does_not(
    shell: OperatorsShell, ec2: Ec2, figure: Figure
):
    up = shell.begin(UP)
    up.wait_for(lambda text: text.count("SSH still not available") >= 2, SOON_S)
    began_s = time.monotonic()
    (head,) = ec2.hosts_of("head")  # the one that was launched before
    head.let_in(ec2.public_keys)
    assert up.wait() > 0
    assert up.process.returncode == 0, last_lines(up.text)
    figure(f"`ray up` ended {time.monotonic() - began_s:.0f} s after the head had let it in")


def test_a_head_that_is_lost_leaves_nodes_that_only_ray_down_ends(shell: OperatorsShell, ec2: Ec2, figure: Figure):
    shell.run(documented("AWS", "aws iam"))
    began_s = time.monotonic()
    wait_until(lambda: ec2.hosts_of("prefill") and ec2.hosts_of("decode"), NODES_WITHIN_S, "a node of each pool")
    (head,) = ec2.running("head")
    status = "ray exec deploy/cluster.yaml 'ray status'"
    figure(f"nodes were up {time.monotonic() - began_s:.0f} s after the head could launch them")
    ec2.client("ec2").terminate_instances(InstanceIds=[head])
    wait_until(lambda: not ec2.hosts[head].runs, SOON_S, "the head is gone")
    assert "Head node of cluster (ridgeline) not found" in last_lines(shell.run(status, fails=True))
    assert len(ec2.instances()) == 2, "they are billed on"
    shell.run(documented("AWS", "ray down"))
    wait_until(lambda: ec2.instances() == [], SOON_S, "nothing runs")
