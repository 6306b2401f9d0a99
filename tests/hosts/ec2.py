"""EC2 as moto emulates it, with a host for each instance that runs.

moto checks neither permissions nor capacity. `Ec2` does where a first launch meets them: a wrong key, a role that may
not read the aliases of images, an instance type that the zone has none of.
"""

from __future__ import annotations

import io
import os
import subprocess
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

import boto3
from botocore.exceptions import BotoCoreError, ClientError
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

from tests.hosts.namespaces import Host

REGION = "us-west-2"
ADDRESS = "172.31.0.1"
"""Of the subnet's router, which the launcher and the head reach; the API's here too."""
METADATA_ADDRESS = "169.254.169.254"
"""Where instances ask for the credentials of their role."""
PUBLIC = "54.214.0.0/16"
"""The public addresses that moto gives."""
PREFIX = "/20"
"""Of a subnet of the default VPC."""
OPERATORS_KEY, AWS_KEY, ROLES_KEY = "AKIDOPERATOR", "AKIDAWS", "test-key"
"""The launcher's, that of what happens within AWS, and the head's, which is what moto's instance metadata answer."""
POLICY = "arn:aws:iam::aws:policy/AmazonSSMReadOnlyAccess"
LOOK_EVERY_S = 0.3
RUNS = ("pending", "running")
Refusal = tuple[int, str, str]
ERROR = (
    "<Response><Errors><Error><Code>{}</Code><Message>{}</Message></Error></Errors><RequestID>r</RequestID></Response>"
)


@dataclass(frozen=True)
class Call:
    """One request to EC2 or IAM."""

    by: str
    """The access key."""
    action: str
    parameters: dict[str, str]
    refused: str
    """The error's code, or nothing."""


class Ec2:
    """`with Ec2(make_host) as ec2`: the API answers; `make_host` gets name, addresses and node type of an instance."""

    def __init__(self, make_host: Callable[[str, list[str], str], Host]) -> None:
        self.calls: list[Call] = []
        self.no_capacity_of: set[str] = set()
        """Instance types that there are none of now."""
        self.broken: set[str] = set()
        """Node types on whose new hosts `apt-get` fails."""
        self.locked: set[str] = set()
        """Node types whose new hosts do not know the key pair."""
        self.hosts: dict[str, Host] = {}
        """By instance id; a host that has ended stays here."""
        self.failures: list[BaseException] = []
        """Of the loop that makes hosts."""
        self._make_host = make_host
        self._over = threading.Event()
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._servers: list[Any] = []
        self._clients: dict[str, Any] = {}
        self._threads: list[threading.Thread] = []

    @property
    def endpoint(self) -> str:
        """The AWS_ENDPOINT_URL."""
        return f"http://{ADDRESS}:{self._servers[0].port}"

    def client(self, service: str) -> Any:
        """A client for what happens within AWS, which is not among `calls`."""
        if service not in self._clients:
            self._clients[service] = boto3.client(
                service,
                region_name=REGION,
                endpoint_url=self.endpoint,
                aws_access_key_id=AWS_KEY,
                aws_secret_access_key="secret",
            )
        return self._clients[service]

    def __enter__(self) -> Ec2:
        os.environ["MOTO_IAM_LOAD_MANAGED_POLICIES"] = "true"  # those of AWS, which Ray gives the head's role
        for address, port in ((ADDRESS, 0), (METADATA_ADDRESS, 80)):
            server = make_server(address, port, self._answer, threaded=True, request_handler=_Quiet)
            self._servers.append(server)
            self._threads.append(threading.Thread(target=server.serve_forever, daemon=True))
        self._threads.append(threading.Thread(target=self._follow, daemon=True))
        self.client("ec2")  # by one thread: to make one is not thread-safe
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for server in self._servers:
            server.shutdown()
        for thread in self._threads:
            thread.join(30)
        for server in self._servers:
            server.server_close()

    @property
    def public_keys(self) -> str:
        """Of all key pairs, a line each."""
        pairs = self.client("ec2").describe_key_pairs(IncludePublicKey=True)["KeyPairs"]
        return "\n".join(pair["PublicKey"] for pair in pairs)

    def instances(self, states: Iterable[str] = RUNS) -> list[dict[str, Any]]:
        """What DescribeInstances answers of those in these states, oldest first."""
        found = self.client("ec2").describe_instances()["Reservations"]
        each = [instance for reservation in found for instance in reservation["Instances"]]
        return [instance for instance in each if instance["State"]["Name"] in set(states)]

    def running(self, node_type: str) -> list[str]:
        """The ids of a node type's instances that run, oldest first."""
        return [one["InstanceId"] for one in self.instances() if tags_of(one).get("ray-user-node-type") == node_type]

    def hosts_of(self, node_type: str) -> list[Host]:
        """The hosts of those that are up."""
        return [self.hosts[each] for each in self.running(node_type) if each in self.hosts]

    def called(self, action: str) -> list[Call]:
        """Those calls that were carried out."""
        return [call for call in self.calls if call.action == action and not call.refused]

    def _follow(self) -> None:
        """Let each instance that runs have a host, and none that does not."""
        while not self._over.wait(LOOK_EVERY_S):
            try:
                runs = self.instances()
                for one in runs:
                    if one["InstanceId"] not in self.hosts:
                        addresses = [one["PrivateIpAddress"] + PREFIX, one["PublicIpAddress"] + "/32"]
                        name = "ip-" + one["PrivateIpAddress"].replace(".", "-")
                        node_type = tags_of(one)["ray-user-node-type"]
                        self.hosts[one["InstanceId"]] = self._make_host(name, addresses, node_type)
                for ended in self.hosts.keys() - {one["InstanceId"] for one in runs}:
                    if self.hosts[ended].runs:
                        self.hosts[ended].kill()
            except (OSError, subprocess.SubprocessError, BotoCoreError, ClientError) as error:
                self.failures.append(error)

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        environ["wsgi.input"] = io.BytesIO(body)
        by = environ.get("HTTP_AUTHORIZATION", "").partition("Credential=")[2].partition("/")[0]
        with suppress(UnicodeDecodeError):
            parameters = dict(parse_qsl(body.decode()))
            if action := parameters.pop("Action", ""):
                refusal = self._refusal(by, action, parameters)
                if by != AWS_KEY:
                    self.calls.append(Call(by, action, parameters, refusal[1] if refusal else ""))
                if refusal is not None:
                    status, code, message = refusal
                    start_response(f"{status} Error", [("Content-Type", "text/xml")])
                    return [ERROR.format(code, message).encode()]
        return self._moto(environ, start_response)

    def _refusal(self, by: str, action: str, parameters: dict[str, str]) -> Refusal | None:
        """Status, code and message with which AWS would refuse this."""
        if by not in (OPERATORS_KEY, AWS_KEY, ROLES_KEY):
            return 401, "AuthFailure", "AWS was not able to validate the provided access credentials"
        if action != "RunInstances":
            return None
        may_read_aliases = any(
            call.parameters.get("PolicyArn") == POLICY for call in self.calls if call.action == "AttachRolePolicy"
        )
        if by == ROLES_KEY and parameters["ImageId"].startswith("resolve:ssm:") and not may_read_aliases:
            return (
                403,
                "UnauthorizedOperation",
                (
                    "You are not authorized to perform this operation. User: arn:aws:sts::123456789012:assumed-role/"
                    "ray-autoscaler-v1/i-0 is not authorized to perform: ssm:GetParameters on resource: "
                    f"{parameters['ImageId'].removeprefix('resolve:ssm:')} because no identity-based policy allows the "
                    "ssm:GetParameters action"
                ),
            )
        if (wanted := parameters["InstanceType"]) in self.no_capacity_of:
            zone = parameters.get("Placement.AvailabilityZone", f"{REGION}a")
            return (
                500,
                "InsufficientInstanceCapacity",
                (
                    f"We currently do not have sufficient {wanted} capacity in the Availability Zone you requested "
                    f"({zone}). "
                    "Our system will be working on provisioning additional capacity."
                ),
            )
        return None


class _Quiet(MotoRequestHandler):
    def log_request(self, *_: object) -> None:
        """Nothing: `Ec2.calls` has them."""


def tags_of(instance: dict[str, Any]) -> dict[str, str]:
    """An instance's tags."""
    return {tag["Key"]: tag["Value"] for tag in instance.get("Tags", [])}
