"""The `ridgeline` command: one function per subcommand, each thin over the package that does the work."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
import logging
import math
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints
from urllib.parse import urlsplit

import typer
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from ridgeline.cluster.config.api_keys import ApiKeyError
from ridgeline.cluster.config.loader import ConfigError, LoadedConfig, explain, load_config
from ridgeline.cluster.deployments import background
from ridgeline.cluster.deployments.background import DETACHED
from ridgeline.cluster.doctor import checks as doctor_checks
from ridgeline.cluster.errors import ServingError
from ridgeline.cluster.folders import NoHome, cache_folder
from ridgeline.cluster.model_store import DEFAULT_MODEL_NAME, ModelError, prepare_model
from ridgeline.contracts.vocabulary import Mode
from ridgeline.loadtest.errors import LoadTestError
from ridgeline.loadtest.plan import ComparePlan, NumberOrAuto, ReplayPlan
from ridgeline.roofline.errors import RooflineError

SERVING_MODULES = frozenset(
    {
        "grpc",
        "jsonschema",
        "opentelemetry",
        "ray",
        "setproctitle",
        "torch",
        "transformers",
        "uvicorn",
        "uvloop",
        "vllm",
        "xxhash",
    }
)
"""What the extras `cpu` and `gpu` install and the commands of the client part do without."""


app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Measure one part of Ridgeline on this machine, without a model.", no_args_is_help=True)
app.add_typer(bench, name="bench")


class _RequestById(TyperGroup):
    """Takes a word that is no command as an id: `ridgeline trace ID`."""

    unnamed = "request"

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        return super().resolve_command(ctx, args if args[0] in self.commands else [self.unnamed, *args])


trace = typer.Typer(
    help="Show where the time of a request went (`ridgeline trace ID`), or look at a trace file before it is replayed.",
    no_args_is_help=True,
    cls=_RequestById,
)
app.add_typer(trace, name="trace")
PIPED_WIDTH = 140
"""Width for files and pipes, where rich would assume 80 columns and cut tables and paths."""
console = Console(emoji=False, width=None if sys.stdout.isatty() else PIPED_WIDTH)
errors = Console(stderr=True, emoji=False, width=None if sys.stderr.isatty() else PIPED_WIDTH)

ConfigOption = Annotated[Path | None, typer.Option("--config", "-c", help="YAML file, for instance deploy/local.yaml")]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="override one setting: section.key=value")]
AddressOption = Annotated[str | None, typer.Option(help="existing Ray cluster: auto or host:port")]
ModelOption = Annotated[str | None, typer.Option(help="directory, hub name or smollm2-135m")]
ModeOption = Annotated[
    Mode | None, typer.Option(help="disaggregated: two pools; colocated: whole replicas; adaptive: by request")
]
LOCAL_URL = "http://127.0.0.1:8000"


def _server_url(text: str) -> str:
    """Strip a slash or /v1 from the end of the URL. Raises typer.BadParameter, which ends the command."""
    try:
        parts = urlsplit(text)
        _ = parts.port
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
        raise typer.BadParameter(
            f"{text!r} is no URL of a server: write it as http://127.0.0.1:8000, an IPv6 address as http://[::1]:8000"
        )
    return text.rstrip("/").removesuffix("/v1")


def _finite(seconds: float) -> float:
    if not math.isfinite(seconds):
        raise typer.BadParameter("a number of seconds is meant; 1000000 is more than anything takes")
    return seconds


AdminKeyOption = Annotated[
    Path | None,
    typer.Option(
        envvar="RIDGELINE_ADMIN_KEY_FILE", help="the server's security.admin_keys_file; its first key is sent"
    ),
]
UrlOption = Annotated[str, typer.Option(parser=_server_url, metavar="URL", help="a running server")]
TimeoutOption = Annotated[
    float,
    typer.Option(
        help="seconds that requests running on a leaving worker get; then they go on elsewhere",
        min=0,
        callback=_finite,
    ),
]
NameOption = Annotated[str, typer.Option(help="the deployment's name, as in `ridgeline status`")]
DEFAULT_NAME = "ridgeline"


def _tell_version(wanted: bool) -> None:
    if wanted:
        from ridgeline.cluster.commands.setup import versions

        ours_first = sorted(versions().items(), key=lambda item: item[0] != "ridgeline")
        console.print(", ".join(f"{name} {value}" for name, value in ours_first if value), highlight=False)
        raise typer.Exit


@app.callback()
def every_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="print what is installed")
    ] = False,
) -> None:
    """Serve one model colocated, disaggregated or adaptive on Ray, and measure which pays."""


def main() -> None:
    """Entry point of the `ridgeline` script."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # what the locale has no sign for
    try:
        app()
    except NoHome as error:
        sys.exit(f"error: {error}")
    except ModuleNotFoundError as error:
        if (missing := (error.name or "").partition(".")[0]) not in SERVING_MODULES:
            raise
        servers = " To compare servers that run, give --server NAME=URL twice." if "compare" in sys.argv[1:2] else ""
        sys.exit(
            f"error: this needs Ridgeline's serving part, and {missing} is not installed: run `pip install '.[cpu]'`, "
            f"or '.[gpu]' for GPUs, in a clone of Ridgeline.{servers}"
        )


def fail(sentences: list[str], status: int = 1) -> None:
    """Print what is wrong, one sentence per line, and end the command."""
    for sentence in sentences:
        errors.print("[red]error:[/]", escape(sentence), highlight=False)
    raise typer.Exit(status)


def load(config: Path | None, settings: list[str] | None, *, both_modes: bool = False, **flags: Any) -> LoadedConfig:
    """Load the configuration with flags on top; any problem ends the command."""
    overrides: dict[str, str] = {}
    for setting in settings or []:
        key, equals, value = setting.partition("=")
        if not equals:
            fail([f"--set {setting}: write it as section.key=value"], 2)
        if key.strip() in overrides:
            fail([f"--set {key.strip()} is given twice: leave one out"], 2)
        overrides[key.strip()] = value
    # Quoted as YAML, in which the name 2 would be a number.
    given = {key.replace("__", "."): value for key, value in flags.items() if value is not None}
    overrides |= {key: json.dumps(value, ensure_ascii=False) for key, value in given.items()}
    try:
        return load_config(config, overrides, both_modes=both_modes)
    except ConfigError as error:
        fail(error.problems, 2)
        raise


@contextmanager
def failures_told(*more: type[Exception]) -> Iterator[None]:
    """Turn known failures, and some `more`, into sentences and end the command; everything else is a traceback."""
    known: tuple[type[Exception], ...] = (ModelError, LoadTestError, ApiKeyError, RooflineError, *more)
    try:
        yield
    except ServingError as error:
        fail(error.sentences)
    except known as error:
        fail([str(error)])


def run(work: Coroutine[Any, Any, object]) -> None:
    """Run a command's coroutine."""
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it prints a line per request
    with failures_told():
        asyncio.run(work)


def with_plan(kind: type[ReplayPlan]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command with a parameter `plan` an option for each field instead, and call it with the checked plan.

    Fields that are fixed have none.
    """
    offered = [name for name in kind.model_fields if name not in kind.fixed]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def call(context: typer.Context, **values: Any) -> None:
            chosen = {name: values.pop(name) for name in offered}
            sources = {name: context.get_parameter_source(name) for name in offered}
            # Without what was not on the command line, so that the plan can tell a default from a choice.
            given = {name: chosen[name] for name, source in sources.items() if source and source.name != "DEFAULT"}
            command(**values, plan=_checked(kind, given))

        hints = get_type_hints(command, include_extras=True)
        own = [
            one.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
            for name, one in inspect.signature(command).parameters.items()
            if name != "plan"
        ]
        context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
        parameters = [context, *own, *(_option(kind, field) for field in offered)]
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {one.name: one.annotation for one in parameters}
        call.__name__, call.__doc__ = command.__name__, command.__doc__
        return call

    return decorate


def _option(kind: type[ReplayPlan], name: str) -> inspect.Parameter:
    """Return the option of a field.

    A number or the word auto is text to typer, and only the plan tells them apart.
    """
    field = kind.model_fields[name]
    annotation: Any = str | None if field.annotation == NumberOrAuto else field.annotation
    metavar = "NUMBER|auto" if field.annotation == NumberOrAuto else None
    help_text = (field.description or "").replace("\n", " ")
    option = typer.Option(help=help_text, metavar=metavar, show_default=name not in kind.follow)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=Annotated[annotation, option]
    )


def _checked(kind: type[ReplayPlan], given: dict[str, Any]) -> ReplayPlan:
    try:
        return kind(**given)
    except ValidationError as error:
        fail([_sentence(one) for one in error.errors()], 2)
        raise


def _sentence(error: ErrorDetails) -> str:
    option = f"--{error['loc'][0]}: ".replace("_", "-") if error["loc"] else ""
    if error["type"] == "value_error":
        return f"{option}{error['msg'].removeprefix('Value error, ')}"
    return f"{option}{error['msg'].removeprefix('Input ')}, not {error['input']}"


@app.command()
def serve(
    config: ConfigOption = None,
    mode: ModeOption = None,
    model: ModelOption = None,
    port: Annotated[int | None, typer.Option(help="HTTP port")] = None,
    host: Annotated[str | None, typer.Option(help="HTTP address")] = None,
    address: AddressOption = None,
    prefill: Annotated[int | None, typer.Option(help="number of prefill workers")] = None,
    decode: Annotated[int | None, typer.Option(help="number of decode workers")] = None,
    settings: SetOption = None,
    explain_only: Annotated[bool, typer.Option("--explain", help="print every effective value and its origin")] = False,
    name: Annotated[str | None, typer.Option(help="what status, stop and logs call it: by default ridgeline")] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="go on without this terminal once it is ready; see status, stop, logs")
    ] = False,
    detached_child: Annotated[bool, typer.Option(DETACHED, hidden=True)] = False,
) -> None:
    """Start the workers and the router, and serve HTTP until Ctrl-C, or without the terminal with --detach."""
    loaded = load(
        config,
        settings,
        name=name,
        mode=mode,
        model__path=model,
        server__port=port,
        server__host=host,
        ray__address=address,
        pools__prefill__workers=prefill,
        pools__decode__workers=decode,
    )
    if explain_only:
        console.print(explain(loaded))
        return
    if detach:
        arguments = [word for word in sys.argv[2:] if word != "--detach"]  # after `ridgeline serve`
        with failures_told():
            background.detach(loaded.config.name, arguments, console)
        return
    from ridgeline.cluster.commands.serve import serve as serve_until_stopped

    run(serve_until_stopped(loaded.config, console, detached=detached_child))


@app.command()
def status() -> None:
    """Show the deployments that run on this machine."""
    background.status(console)


@app.command()
def stop(
    name: NameOption = DEFAULT_NAME,
    now: Annotated[bool, typer.Option("--now", help="do not wait for running requests")] = False,
) -> None:
    """Have a deployment of this machine finish its requests and end."""
    with failures_told():
        background.stop(name, now=now, console=console)


@app.command()
def logs(
    name: NameOption = DEFAULT_NAME,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="go on until the deployment ends")] = False,
    worker: Annotated[
        str,
        typer.Option(help="the log of worker-0, router (of several: router-0) or dispatcher instead, of this machine"),
    ] = "",
) -> None:
    """Print what a detached deployment has printed, or what one of its workers or routers has logged."""
    with failures_told():
        background.logs(name, follow=follow, console=console, worker=worker)


@app.command()
def doctor(
    config: ConfigOption = None, mode: ModeOption = None, settings: SetOption = None, address: AddressOption = None
) -> None:
    """Check whether this machine, or with --address a Ray cluster, can run the configuration; failures name fixes."""
    loaded = load(config, settings, mode=mode, ray__address=address).config
    results = doctor_checks.checks(loaded)
    if loaded.ray.address is not None and not doctor_checks.failures(results):
        from ridgeline.cluster.doctor.joined import joined_checks

        results += asyncio.run(joined_checks(loaded))
    console.print(doctor_checks.report(results))
    if doctor_checks.failures(results):
        raise typer.Exit(1)


@app.command()
def model(path: Annotated[str, typer.Argument(help="directory, hub name or smollm2-135m")] = "smollm2-135m") -> None:
    """Prepare a model and print where it is."""
    with failures_told():
        console.print(str(prepare_model(path, lambda text: console.print(text))))


@app.command()
def roofline(
    model: Annotated[
        str, typer.Option(help="directory of a checkpoint, or a name such as llama-3.1-8b; a wrong one lists all names")
    ] = "smollm2-135m",
    hardware: Annotated[
        str,
        typer.Option(
            help="a device such as h100-sxm, where a wrong name lists all names; `host` measures this machine"
        ),
    ] = "host",
    dtype: Annotated[
        str, typer.Option(help="bfloat16, float32, float8_e4m3fn, ...; auto: what serve would use")
    ] = "auto",
    cores: Annotated[int, typer.Option(help="threads, for --hardware host")] = 1,
    drafted_tokens: Annotated[
        int, typer.Option(help="tokens that speculation drafts for each sequence and decode step", min=0)
    ] = 0,
    acceptance: Annotated[
        float, typer.Option(help="the part of drafted tokens that the model accepts, for tok/s", min=0.0, max=1.0)
    ] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Print shapes, arithmetic intensities, ridge and floors of a model on a device."""
    from ridgeline.cluster.config.models import RidgelineConfig
    from ridgeline.roofline.analysis import roofline_table
    from ridgeline.roofline.calibration import load_or_calibrate_host
    from ridgeline.roofline.hardware import hardware_by_name
    from ridgeline.roofline.model_shape import load_model_shape
    from ridgeline.roofline.quantisation import dtype_bytes
    from ridgeline.roofline.render import render, to_json

    here = hardware == "host"
    with failures_told():
        path = str(prepare_model(model)) if model == DEFAULT_MODEL_NAME else model
        if dtype == "auto":
            dtype = doctor_checks.resolve_dtype(RidgelineConfig()) if here else "bfloat16"
        element_bytes = dtype_bytes(dtype)
        shape = load_model_shape(path, weight_bytes_per_param=element_bytes, kv_bytes_per_element=element_bytes)
        device = load_or_calibrate_host(cache_folder(), cores, dtype) if here else hardware_by_name(hardware)
        rows = roofline_table(shape, device, drafted_tokens=drafted_tokens, acceptance=acceptance)
    if as_json:
        console.out(to_json(shape, device, rows), highlight=False)
    else:
        console.print(render(shape, device, rows))


@bench.command()
def transfer(
    tokens: Annotated[int, typer.Option(help="tokens in one hand-off; rounded up to blocks of 32")] = 1700,
    layers: Annotated[int, typer.Option(help="layers of the KV cache")] = 30,
    block_bytes: Annotated[
        int, typer.Option(help="bytes of a block of 32 tokens in one layer; the default is SmolLM2-135M in bfloat16")
    ] = 24 << 10,
    rounds: Annotated[int, typer.Option(help="hand-offs of each transport")] = 20,
    transports: Annotated[
        list[str] | None, typer.Option("--transport", help="grpc, shm, ...; may be repeated; all by default")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="file for all figures and rounds")] = None,
) -> None:
    """Move KV blocks between two processes by each transport: GB/s, latency and CPU time, compared with memcpy."""
    from ridgeline.cluster.commands.bench import MeasureError, MeasureSettings, bench_transfer, problems_of

    settings = MeasureSettings(tokens, layers, block_bytes, rounds)
    if transports:
        settings = dataclasses.replace(settings, transports=tuple(dict.fromkeys(transports)))
    if problems := problems_of(settings, json_file):
        fail(problems, 2)
    with failures_told(MeasureError):
        bench_transfer(settings, json_file, console)


@app.command()
def top(
    url: UrlOption = LOCAL_URL,
    interval_s: Annotated[float, typer.Option(help="seconds between readings", min=0.2)] = 2.0,
    count: Annotated[int, typer.Option(help="readings, then end; 0: until Ctrl-C")] = 0,
) -> None:
    """Watch each pool of a running server: load, free KV, arithmetic intensity against the ridge.

    A key for /metrics is read from RIDGELINE_METRICS_KEY, an API key from RIDGELINE_API_KEY.
    """
    from ridgeline.cluster.commands.top import watch

    run(watch(url, interval_s, count, console))


@app.command()
def drain(
    worker: Annotated[str, typer.Argument(help="the worker that is to leave, as in the table of serve: worker-1")],
    url: UrlOption = LOCAL_URL,
    timeout_s: TimeoutOption = 30.0,
    force: Annotated[
        bool, typer.Option("--force", help="drain even the last worker of its pool; needs an admin key")
    ] = False,
    admin_key_file: AdminKeyOption = None,
) -> None:
    """Let one worker finish what it does and leave for good."""
    from ridgeline.cluster.commands.operators import drain as drain_worker

    run(drain_worker(url, worker, timeout_s, force=force, admin_key_file=admin_key_file, console=console))


@app.command()
def mode(
    wanted: Annotated[Mode | None, typer.Argument(help="the mode to change to; without it, print the current one")] = (
        None
    ),
    url: UrlOption = LOCAL_URL,
    admin_key_file: AdminKeyOption = None,
) -> None:
    """Print the mode of a running server, or change it while it serves; no request is lost."""
    from ridgeline.cluster.commands.operators import mode as tell_or_change

    run(tell_or_change(url, wanted, admin_key_file=admin_key_file, console=console))


@app.command()
def decisions(
    url: UrlOption = LOCAL_URL,
    last: Annotated[int, typer.Option(help="number of latest decisions to show", min=1, max=1000)] = 10,
    admin_key_file: AdminKeyOption = None,
) -> None:
    """Explain the latest choices of workers in mode adaptive: reason, alternatives, what was predicted and seen."""
    from ridgeline.cluster.commands.decisions import decisions as explain

    run(explain(url, last, admin_key_file=admin_key_file, console=console))


@app.command()
def record(
    file: Annotated[Path, typer.Argument(help="where to write; must not exist yet")],
    url: UrlOption = LOCAL_URL,
    seconds: Annotated[float, typer.Option(help="how long to record", min=0.1, max=86_400)] = 3600.0,
    most_mib: Annotated[int, typer.Option(help="largest size of the file", min=1, max=4096)] = 64,
    admin_key_file: AdminKeyOption = None,
) -> None:
    """Record what a running server's scheduler sees and decides, without any text, for `ridgeline whatif`."""
    from ridgeline.cluster.commands.operators import record as record_into
    from ridgeline.contracts.section import MIB

    try:
        run(record_into(file, url, seconds, most_mib * MIB, admin_key_file=admin_key_file, console=console))
    except KeyboardInterrupt:
        raise typer.Exit from None


@app.command()
def whatif(
    file: Annotated[Path, typer.Argument(help="a recording, made by `ridgeline record`", exists=True, dir_okay=False)],
    policy: Annotated[
        list[str] | None,
        typer.Option(help="adaptive, `1 of 2 for prefill`, threshold:split_above_tokens=256, or an installed policy"),
    ] = None,
    workers: Annotated[list[int] | None, typer.Option(help="serve with so many workers", min=1, max=1000)] = None,
    ttft_ms: Annotated[float | None, typer.Option(help="TTFT SLO of every request", min=0.1)] = None,
    tpot_ms: Annotated[float | None, typer.Option(help="TPOT SLO of every request", min=0.1)] = None,
) -> None:
    """Simulate what other policies, SLOs or numbers of workers would have made of recorded requests."""
    from ridgeline.cluster.commands.whatif import whatif as simulate

    slos = [None if value is None else value / 1e3 for value in (ttft_ms, tpot_ms)]
    with failures_told():
        simulate(file, console, policy or (), workers or (), *slos)


@app.command()
def plan(
    file: Annotated[
        Path | None, typer.Argument(help="a recording, made by `ridgeline record`", exists=True, dir_okay=False)
    ] = None,
    trace: Annotated[
        str | None, typer.Option(help="plan for this trace instead of the recorded requests; as replay's --trace")
    ] = None,
    model: Annotated[str | None, typer.Option(help="with --hardware: as `ridgeline roofline` takes it")] = None,
    hardware: Annotated[
        str | None, typer.Option(help="take steps from the data sheet of this device, such as h100-sxm, not measured")
    ] = None,
    link_gb_per_s: Annotated[
        float, typer.Option(help="between the devices of one worker, each way: NVLink 4 has 450, PCIe 5 has 64", min=1)
    ] = 450.0,
    goal: Annotated[float, typer.Option(help="part of the requests that meet their SLOs", min=0.01, max=1.0)] = 0.95,
    growth: Annotated[float, typer.Option(help="so many times the rate", min=0.01, max=1000.0)] = 1.0,
    most: Annotated[int, typer.Option(help="most workers to try, or devices with --hardware", min=1, max=256)] = 32,
    ttft_ms: Annotated[float | None, typer.Option(help="TTFT SLO of every request", min=0.1)] = None,
    tpot_ms: Annotated[float | None, typer.Option(help="TPOT SLO of every request", min=0.1)] = None,
    check: Annotated[
        Path | None,
        typer.Option(help="serve the best two modes by `ridgeline compare` into this folder, and tell the regret"),
    ] = None,
    config: ConfigOption = None,
    settings: SetOption = None,
) -> None:
    """Simulate how many workers, divided how, keep the SLOs of recorded requests or of a trace."""
    from ridgeline.cluster.commands.whatif import PlanAsked, checked, compare_plan, pools_of, require_new, write_trace
    from ridgeline.cluster.commands.whatif import plan as simulate

    ttft_slo_s, tpot_slo_s = (None if value is None else value / 1e3 for value in (ttft_ms, tpot_ms))
    asked = PlanAsked(
        file=file,
        trace=trace,
        model=model,
        hardware=hardware,
        link_gb_per_s=link_gb_per_s,
        goal=goal,
        growth=growth,
        most=most,
        ttft_slo_s=ttft_slo_s,
        tpot_slo_s=tpot_slo_s,
        is_checked=check is not None,
    )
    if model and not hardware:
        fail(["--model says how long steps take on a device: name one by --hardware, or leave out --model"], 2)
    if check is None and (config or settings):
        fail(["--config and --set say how --check serves: give --check DIR, or leave them out"], 2)
    if check is not None:
        if hardware:
            fail(["--check serves on this machine's workers: leave out --hardware, or --check"], 2)
        with failures_told():
            require_new(check)
        load(config, [*(settings or ()), *pools_of([])], both_modes=True)  # what is wrong with it is told first
    with failures_told():
        modes, served = simulate(asked, console)
        comparison = compare_plan(modes, served, check) if check is not None else None
    if check is None or comparison is None:
        return
    from ridgeline.cluster.commands.own_variants import refusals

    loaded = load(config, [*(settings or ()), *pools_of(modes)], both_modes=True)
    if found := list(refusals(loaded.config, comparison)):
        fail(found, 2)
    with failures_told():
        write_trace(served, check)
    run(checked(loaded.config, comparison, check, console))


@app.command()
def scale(
    workers: Annotated[
        list[str] | None, typer.Argument(help="how many workers a pool shall have: prefill=2 decode=1")
    ] = None,
    url: UrlOption = LOCAL_URL,
    cancel: Annotated[bool, typer.Option("--cancel", help="cancel the scale or restart that is under way")] = False,
    timeout_s: TimeoutOption = 30.0,
    admin_key_file: AdminKeyOption = None,
) -> None:
    """Give pools of a running server more workers or fewer; no request is lost.

    With --cancel, serving workers stay. A worker that drains already leaves, or comes back from a restart.
    """
    from ridgeline.cluster.commands import operators

    if cancel == bool(workers):
        fail(["say how many workers pools shall have, such as prefill=2, or --cancel"], status=2)
    if cancel:
        run(operators.cancel(url, admin_key_file=admin_key_file, console=console))
        return
    try:
        wanted = operators.wanted_workers(workers or [])
    except ValueError as error:
        fail([str(error)], status=2)
    run(operators.scale(url, wanted, timeout_s, admin_key_file=admin_key_file, console=console))


@app.command()
def restart(
    url: UrlOption = LOCAL_URL,
    timeout_s: TimeoutOption = 30.0,
    admin_key_file: AdminKeyOption = None,
) -> None:
    """Start every worker of a running server again, one after the other; no request is lost."""
    from ridgeline.cluster.commands.operators import restart as restart_workers

    run(restart_workers(url, timeout_s, admin_key_file=admin_key_file, console=console))


@trace.command(_RequestById.unnamed)
def trace_request(
    request_id: Annotated[str, typer.Argument(help="id of an answer, its x-request-id, or a trace id", metavar="ID")],
    url: UrlOption = LOCAL_URL,
    admin_key_file: AdminKeyOption = None,
) -> None:
    """Show the stages of a request that has ended, over router and both legs; the word `request` may be left out."""
    from ridgeline.cluster.commands.ended_request import show

    run(show(url, request_id, admin_key_file=admin_key_file, console=console))


@trace.command("inspect")
def inspect_trace(
    file: Annotated[str, typer.Argument(help="a trace, as replay's --trace takes it", metavar="FILE")],
    limit: Annotated[int | None, typer.Option(help="first N requests only", min=1)] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="directory or hub name of a tokenizer, for traces that hold texts")
    ] = None,
) -> None:
    """Say what a trace is: format, dropped rows, lengths, arrivals, burstiness, prefix reuse. Sends nothing."""
    from ridgeline.cluster.commands.inspect_trace import inspect_file

    with failures_told():
        inspect_file(file, tokenizer, limit, console)


@app.command()
@with_plan(ReplayPlan)
def replay(
    plan: ReplayPlan,
    url: UrlOption = LOCAL_URL,
    out: Annotated[Path | None, typer.Option(help="folder for summary.json and records.jsonl")] = None,
) -> None:
    """Replay a trace against a running server, open loop, and print TTFT, TPOT and goodput.

    The server's API key is read from RIDGELINE_API_KEY, its key for /metrics from RIDGELINE_METRICS_KEY.
    """
    from ridgeline.cluster.commands.replay import replay_command

    run(replay_command(url, plan, out, console))


@app.command()
@with_plan(ComparePlan)
def compare(
    plan: ComparePlan,
    out: Annotated[
        Path | None, typer.Option(help="folder for summary.json and report.html; if it holds a run, DIR-2 and so on")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="go on with the interrupted comparison in this folder, with its own plan")
    ] = None,
    config: ConfigOption = None,
    settings: SetOption = None,
) -> None:
    """Compare running servers of any kind, or the modes of an own deployment, in pairs of rounds over rates."""
    from ridgeline.cluster.commands.loadtest import compare_command, resume_command

    if resume is not None and out is None:
        again = load(config, settings, both_modes=True).config if config or settings else None
        run(resume_command(resume, plan, again, console))
        return
    if out is None or resume is not None:
        fail(["give --out DIR for a new comparison, or --resume DIR to go on with an interrupted one"], 2)
        return
    if not plan.modes:
        if config or settings:
            fail(["--config and --set are of an own deployment: name its modes with --variants, or leave them out"], 2)
        run(compare_command(None, plan, out, console))
        return
    from ridgeline.cluster.commands.own_variants import refusals

    loaded = load(config, settings, both_modes=True)
    if found := list(refusals(loaded.config, plan)):
        fail(found, 2)
    run(compare_command(loaded.config, plan, out, console))


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="the folder of a finished comparison", metavar="DIR")],
    export: Annotated[
        Literal["vllm-bench"] | None,
        typer.Option(help="instead, write the valid rounds to DIR/FORMAT as `vllm bench serve` writes its results"),
    ] = None,
) -> None:
    """Write report.html of a finished comparison again, or export its rounds."""
    from ridgeline.cluster.commands.loadtest import report_command

    with failures_told():
        report_command(folder, console, export)


if __name__ == "__main__":
    main()
