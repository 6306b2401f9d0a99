"""Whoever types the commands of docs/how-to/deploy.md: a home, a shell in the repository, and what it has printed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
COMMAND_WITHIN_S = 540.0
"""Five processes import vLLM there, which a busy machine takes minutes for."""
AWS = f"""#!{sys.executable}
import sys, boto3
service, call, *options = sys.argv[1:]
camel = {{name: "".join(map(str.capitalize, name.strip("-").split("-"))) for name in options[::2]}}
getattr(boto3.client(service), call.replace("-", "_"))(**dict(zip(camel.values(), options[1::2], strict=True)))
"""
"""AWS's command line, as far as the page uses it."""


AT_HOME = 'mount --bind "$HOME/passwd" /etc/passwd && exec bash -c "$0"'
"""ssh takes the home for `~` from there, whatever HOME says."""


class Running:
    """A command that was begun."""

    def __init__(self, command: str, environment: Mapping[str, str], output: Path) -> None:
        self.command = command
        self._began_s = time.monotonic()
        self._output = output
        with output.open("w") as opened:
            self.process = subprocess.Popen(
                ["unshare", "--mount", "bash", "-c", AT_HOME, command],
                cwd=REPOSITORY,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=opened,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def text(self) -> str:
        """What it has printed, in lines that a narrow terminal has not broken."""
        return self._output.read_text(errors="replace")

    def wait_for(self, condition: Callable[[str], object], within_s: float) -> str:
        """Wait until what it has printed fulfils the condition."""
        give_up_s = time.monotonic() + within_s
        while not condition(text := self.text):
            assert time.monotonic() < give_up_s, f"not within {within_s:.0f} s, {self.command}:\n{text[-3000:]}"
            assert self.process.poll() is None or condition(self.text), f"{self.command} is over:\n{text[-3000:]}"
            time.sleep(0.25)
        return text

    def end(self) -> None:
        """End it as Ctrl-C does, or if that does not, as SIGKILL does."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
            return
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)

    def wait(self, within_s: float = COMMAND_WITHIN_S) -> float:
        """Wait for its end; returns how long it took."""
        self.process.wait(within_s)
        return time.monotonic() - self._began_s


class OperatorsShell:
    """Runs commands as `source .venv/bin/activate` leaves a shell of the operator's in the repository."""

    def __init__(self, folder: Path, variables: Mapping[str, str]) -> None:
        self.home = folder / "operator"
        for part in ("bin", "tmp"):
            (self.home / part).mkdir(parents=True)
        users = Path("/etc/passwd").read_text()
        (self.home / "passwd").write_text(
            re.sub(r"^(root:.*:).*(:.*)$", rf"\1{self.home}\2", users, flags=re.MULTILINE)
        )
        aws = self.home / "bin/aws"
        aws.write_text(AWS)
        aws.chmod(0o755)
        path = f"{self.home}/bin:{sys.prefix}/bin:{os.environ['PATH']}"
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "AWS_"))}
        self.environment = {**kept, "HOME": str(self.home), "PATH": path, "COLUMNS": "250", **variables}
        self.environment["TMPDIR"] = f"{self.home}/tmp"  # where Ray caches what a provider has told it
        self.took_s: dict[str, float] = {}
        """Seconds of each command so far, by its first words."""
        self._begun: list[Running] = []

    @property
    def output(self) -> str:
        """What the commands have printed."""
        return "".join(one.text for one in self._begun)

    def begin(self, command: str, **variables: str) -> Running:
        """Start a command."""
        output = self.home / f"output-{len(self._begun)}"
        self._begun.append(Running(command, {**self.environment, **variables}, output))
        return self._begun[-1]

    def run(self, command: str, *, fails: bool = False, within_s: float = COMMAND_WITHIN_S, **variables: str) -> str:
        """Run a command to its end, which is that of a success unless it `fails`."""
        running = self.begin(command, **variables)
        self.took_s[" ".join(command.replace("deploy/", "").split()[:4])] = running.wait(within_s)
        text = running.text
        assert (running.process.returncode != 0) == fails, (
            f"{command} ended with {running.process.returncode}:\n{text[-6000:]}"
        )
        return text

    def end_all(self) -> None:
        """End what still runs."""
        for one in self._begun:
            if one.process.poll() is None:
                one.end()


def documented_commands(section: str) -> list[str]:
    """Return the lines of the code blocks in that section of the page, without their comments."""
    page = (REPOSITORY / "docs/how-to/deploy.md").read_text()
    text = page.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    lines = [line.partition("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line]


def documented(section: str, beginning: str) -> str:
    """Return the one command of that section that begins so."""
    (command,) = [line for line in documented_commands(section) if line.startswith(beginning)]
    return command
