"""Measures the modes of a running server from outside, with the client of `vllm bench serve`.

    ridgeline serve --config deploy/local.yaml
    python -m tools.bench.modes --rounds 2
    python -m tools.bench.modes --beside vllm=http://127.0.0.1:9000 --shapes 128/128,turns
    python -m tools.bench.modes --slos 2.5:1.5,5:2 --loads 0.6,0.9,1.2 --record runs/recordings

Each shape is served alone first, in the first mode, which gives the SLOs, and then all at once, which gives the rates.
Then each mode serves each rate, in random order, with the same arrivals and with prompts of its own: those of another
mode would be in the prefix caches. OUT has a line for each round; the table at the end has the requests in time.
With --record the first mode serves other requests before, at all loads; their recordings are for `ridgeline plan`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import itertools
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.table import Table

from ridgeline.cluster.model_store import prepare_model
from ridgeline.loadtest.trace.trace import DEMO_FILE

MODES: Final = ("colocated", "disaggregated", "adaptive")
CONVERSATION, TURNS = "conversation", "turns"
TURNING: Final = ((512, 16), (64, 96), (512, 16))
"""Tokens in and out of the parts of `turns`: long prompts, long answers, long prompts."""
RIDGELINE: Final = str(Path(sys.executable).parent / "ridgeline")
RECORDER_STARTS_S: Final = 60.0
"""Within which a recorder has written its first line; else it was refused."""
LEAST_SLACK_S: Final = 0.3
"""Of a TTFT SLO beside the unloaded TTFT: for a short prompt most of that is not the engine's."""
WARMING, ALONE, SATURATING = 2, 4, 32
"""Requests that are sent one after the other, then likewise and measured, then all at once."""
Lengths = tuple[int, int]
Slos = tuple[float, float]
"""Of TTFT and TPOT: in seconds, or as parts of those of a request alone."""


class Spec(msgspec.Struct, frozen=True):
    """One mode at one rate."""

    shape: str
    round: int
    load: float
    """The rate, as a part of the saturated one."""
    rate_per_s: float
    mode: str
    ttft_slo_s: float
    tpot_slo_s: float


class Measured(msgspec.Struct, frozen=True):
    """What the client saw; a request that failed has no times."""

    spec: Spec
    arrival_s: list[float]
    """When each was sent, from the first one on."""
    lengths: list[Lengths]
    ttft_s: list[float]
    tpot_s: list[float]
    longest_gap_s: list[float]
    failed: int
    duration_s: float
    output_tokens_per_s: float

    @property
    def requests(self) -> int:
        """Requests that were sent."""
        return len(self.ttft_s) + self.failed

    @property
    def in_time(self) -> int:
        """Requests that met both SLOs."""
        times = zip(self.ttft_s, self.tpot_s, strict=True)
        return sum(ttft <= self.spec.ttft_slo_s and tpot <= self.spec.tpot_slo_s for ttft, tpot in times)


def lengths_of(shape: str, number: int, draw: random.Random) -> list[Lengths]:
    """Return tokens in and out of so many requests. Raises ValueError for a shape that is not there."""
    if shape == CONVERSATION:  # the lengths of the Azure trace of 2023, halved
        rows = [msgspec.json.decode(line) for line in DEMO_FILE.read_bytes().splitlines()]
        first = draw.randrange(len(rows))
        chosen = itertools.islice(itertools.cycle(rows), first, first + number)
        return [(row["input_length"], row["output_length"]) for row in chosen]
    if shape == TURNS:
        return [TURNING[len(TURNING) * index // number] for index in range(number)]
    try:
        tokens, answer = map(int, shape.split("/"))
    except ValueError:
        raise ValueError(f"shape {shape!r} is neither IN/OUT, as 512/64, nor {CONVERSATION} nor {TURNS}") from None
    return [(tokens, answer)] * number


def measured(spec: Spec, lengths: list[Lengths], told: Mapping[str, Any]) -> Measured:
    """Return what `vllm bench serve` has told of a round of requests of these lengths."""
    answered = [
        (ttft, gaps) for ttft, gaps, error in zip(told["ttfts"], told["itls"], told["errors"], strict=True) if not error
    ]
    return Measured(
        spec,
        [sent_s - min(told["start_times"]) for sent_s in told["start_times"]],
        lengths,
        [ttft for ttft, _ in answered],
        [statistics.fmean(gaps) if gaps else 0.0 for _, gaps in answered],
        [max(gaps, default=0.0) for _, gaps in answered],
        failed=len(told["ttfts"]) - len(answered),
        duration_s=told["duration"],
        output_tokens_per_s=told["output_throughput"],
    )


class Client:
    """`vllm bench serve` in this process, whose start takes longer than many a round."""

    def __init__(self, model: str, served_model_name: str) -> None:
        """`model` is a directory; prompts are made of the words in its vocabulary."""
        from vllm.benchmarks import serve
        from vllm.tokenizers import get_tokenizer
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        self._serve, self._parser = serve, FlexibleArgumentParser()
        serve.add_cli_args(self._parser)
        self._model, self._served_model_name = model, served_model_name
        words = (token[1:] for token in get_tokenizer(model).get_vocab() if token.startswith("Ġ"))
        self._words = sorted(f" {word}" for word in words if word.isascii() and word.isalpha() and len(word) > 2)
        self._draw = random.Random(time.time_ns())

    async def run(self, url: str, lengths: Sequence[Lengths], **options: object) -> dict[str, Any]:
        """Send requests of these lengths, and return what `vllm bench serve` has of them."""
        from vllm.benchmarks.datasets import SampleRequest

        requests = [
            SampleRequest("".join(self._draw.choices(self._words, k=tokens)), tokens, answer, request_id=str(index))
            for index, (tokens, answer) in enumerate(lengths)
        ]
        given = {
            "base-url": url,
            "model": self._served_model_name,
            "tokenizer": self._model,
            "num-prompts": len(lengths),
        }
        words = ["--dataset-name", "custom", "--ignore-eos", "--save-detailed", "--disable-tqdm"]
        for name, value in {**given, "ready-check-timeout-sec": 0, **options}.items():
            words += [f"--{name.replace('_', '-')}", *map(str, value if isinstance(value, tuple) else (value,))]
        self._serve.get_samples = lambda *_: requests  # its own reader of files needs pandas
        with contextlib.redirect_stdout(io.StringIO()):
            told: dict[str, Any] = await self._serve.main_async(self._parser.parse_args(words))
        return told


async def change_mode(url: str, mode: str) -> None:
    """Change the server's mode as an operator does. Raises SystemExit if that is refused."""
    process = await asyncio.create_subprocess_exec(RIDGELINE, "mode", mode, "--url", url, stdout=subprocess.DEVNULL)
    if await process.wait():
        raise SystemExit(f"the mode of {url} cannot become {mode}")


class Bench:
    """Measures shape after shape."""

    def __init__(self, client: Client, given: argparse.Namespace, console: Console) -> None:
        self._client, self._given, self._console = client, given, console
        self._beside = dict(given.beside)
        self._draw = random.Random()

    async def shape(self, shape: str) -> list[Measured]:
        """Return the rounds of a shape, each of which is written as it ends."""
        given, rounds = self._given, list[Measured]()
        alone, saturated_per_s = await self._unloaded_and_saturated(shape)
        number = given.requests.get(shape, given.requests[""])
        levels = [self._slos(shape, alone, factors) for factors in given.slos]
        if given.record is not None:
            await self._record(shape, number, saturated_per_s, levels[-1])
        for turn, slos, load in itertools.product(range(given.rounds), levels, given.loads):
            seed, lengths = self._draw.randrange(1 << 30), lengths_of(shape, number, self._draw)
            for mode in self._draw.sample([*given.modes, *self._beside], len(given.modes) + len(self._beside)):
                spec = Spec(shape, turn, load, load * saturated_per_s, mode, *slos)
                rounds.append(await self._round(spec, lengths, seed))
                with given.out.open("ab") as out:
                    out.write(msgspec.json.encode(rounds[-1]) + b"\n")
        return rounds

    async def _unloaded_and_saturated(self, shape: str) -> tuple[Slos, float]:
        url, draw = self._given.url, self._draw
        await change_mode(url, self._given.modes[0])
        await self._client.run(url, lengths_of(shape, WARMING, draw), max_concurrency=1)
        nothing, lengths = Spec(shape, 0, 0.0, 0.0, self._given.modes[0], 0.0, 0.0), lengths_of(shape, ALONE, draw)
        alone = measured(nothing, lengths, await self._client.run(url, lengths, max_concurrency=1))
        full = await self._client.run(url, lengths_of(shape, SATURATING, draw))
        ttft_s, tpot_s = statistics.median(alone.ttft_s), statistics.median(alone.tpot_s)
        self._console.print(
            f"{shape}: alone TTFT {ttft_s * 1e3:.0f} ms, TPOT {tpot_s * 1e3:.1f} ms; saturated "
            f"{full['request_throughput']:.2f} requests/s",
            soft_wrap=True,
        )
        return (ttft_s, tpot_s), full["request_throughput"]

    def _slos(self, shape: str, alone_s: Slos, factors: Slos) -> Slos:
        slos = max(factors[0] * alone_s[0], alone_s[0] + LEAST_SLACK_S), factors[1] * alone_s[1]
        self._console.print(f"{shape}: SLOs {slos[0] * 1e3:.0f} ms and {slos[1] * 1e3:.1f} ms", soft_wrap=True)
        return slos

    async def _record(self, shape: str, number: int, saturated_per_s: float, slos: Slos) -> None:
        to = self._given.record / f"{shape.replace('/', '-')}.jsonl"
        to.parent.mkdir(parents=True, exist_ok=True)
        recorder = await asyncio.create_subprocess_exec(
            *(RIDGELINE, "record", str(to), "--url", self._given.url), stdout=subprocess.DEVNULL
        )
        try:
            async with asyncio.timeout(RECORDER_STARTS_S):
                while not (to.exists() and to.stat().st_size):  # noqa: ASYNC110 - a file has no event
                    await asyncio.sleep(0.1)
            for load in self._given.loads:
                spec = Spec(shape, 0, load, load * saturated_per_s, self._given.modes[0], *slos)
                await self._round(spec, lengths_of(shape, number, self._draw), self._draw.randrange(1 << 30))
        finally:
            if recorder.returncode is None:
                recorder.terminate()
            await recorder.wait()

    async def _round(self, spec: Spec, lengths: list[Lengths], seed: int) -> Measured:
        if spec.mode in MODES:
            await change_mode(self._given.url, spec.mode)
        told = await self._client.run(
            self._beside.get(spec.mode, self._given.url),
            lengths,
            request_rate=spec.rate_per_s,
            seed=seed,
            header=(
                f"x-ridgeline-ttft-ms={spec.ttft_slo_s * 1e3:.0f}",
                f"x-ridgeline-tpot-ms={spec.tpot_slo_s * 1e3:.1f}",
            ),
        )
        now = measured(spec, lengths, told)
        self._console.print(
            f"  round {spec.round}, {spec.rate_per_s:.2f}/s, {spec.mode:14} {now.in_time:3} of {now.requests} in time, "
            f"TTFT {statistics.median(now.ttft_s) * 1e3:.0f} ms, TPOT {statistics.median(now.tpot_s) * 1e3:.1f} ms",
            soft_wrap=True,
        )
        return now


def table(rounds: Iterable[Measured]) -> Table:
    """Return the requests in time, by shape and rate, and of each shape over its rates."""
    of: dict[tuple[str, str], dict[str, tuple[int, int]]] = {}
    for one in rounds:
        for load in (f"{one.spec.load:g}", "all"):
            row = of.setdefault((one.spec.shape, load), {})
            kept, sent = row.get(one.spec.mode, (0, 0))
            row[one.spec.mode] = kept + one.in_time, sent + one.requests
    modes = list(dict.fromkeys(mode for row in of.values() for mode in row))
    made = Table("shape", "load", *modes, title="requests in time", title_justify="left")
    for (shape, load), row in sorted(of.items()):
        made.add_row(shape, load, *("{} of {}".format(*row[mode]) if mode in row else "" for mode in modes))
    return made


def options() -> argparse.ArgumentParser:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.modes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="a running server that can serve in these modes")
    add("--modes", type=lambda text: text.split(","), default=MODES)
    add("--beside", action="append", type=_named, default=[], metavar="NAME=URL", help="another server, in turn")
    add("--shapes", type=lambda text: text.split(","), default=("128/128", "64/128", "512/64", "1024/24", CONVERSATION))
    add("--loads", type=lambda text: [float(one) for one in text.split(",")], default=(0.6, 0.75, 0.9))
    add("--slos", type=_factors, default=[(4.0, 2.0)], metavar="TTFT:TPOT,...", help="times those of a request alone")
    add("--rounds", type=int, default=2)
    add("--requests", type=_requests, default={"": 28}, metavar="N,SHAPE=N", help="requests of a round, by default 28")
    add("--model", default="smollm2-135m", help="as the server's model.path")
    add("--out", type=Path, default=Path("runs/bench-modes.jsonl"))
    add("--record", type=Path, metavar="DIR", help="write a recording of each shape there, in the first mode")
    return parser


def _named(text: str) -> tuple[str, str]:
    name, equals, url = text.partition("=")
    if not equals or name in MODES:
        raise argparse.ArgumentTypeError(f"write NAME=URL with a name that is no mode, not {text!r}")
    return name, url


def _factors(text: str) -> list[Slos]:
    levels = (level.split(":") for level in text.split(","))
    return [(float(ttft), float(tpot)) for ttft, tpot in levels]


def _requests(text: str) -> dict[str, int]:
    parts = (one.rpartition("=") for one in text.split(","))
    return {"": 28, **{shape: int(number) for shape, _, number in parts}}


async def measure(client: Client, given: argparse.Namespace, console: Console) -> list[Measured]:
    """Measure all shapes."""
    bench = Bench(client, given, console)
    return [one for shape in given.shapes for one in await bench.shape(shape)]


def main() -> None:
    """Run the command line."""
    parser, console = options(), Console(highlight=False)
    given = parser.parse_args()
    try:
        for shape in given.shapes:
            lengths_of(shape, 1, random.Random())
    except ValueError as error:
        parser.error(str(error))
    given.out.parent.mkdir(parents=True, exist_ok=True)
    client = Client(str(prepare_model(given.model)), given.model)
    console.print(table(asyncio.run(measure(client, given, console))))


if __name__ == "__main__":
    main()
