"""No code of ours turns bytes into objects or code by anything but a typed decoder, and every limit is set."""

import ast
from pathlib import Path

from ridgeline.kv_transfer.wire import grpc_methods
from ridgeline.worker_runtime.client import OPTIONS

REPOSITORY = Path(__file__).parents[2]
PACKAGES = (
    *("cluster", "router", "prefill_worker", "decode_worker", "loadtest", "worker_runtime", "engine", "kv_transfer"),
    *("roofline", "contracts"),
)
FILES = sorted(path for package in PACKAGES for path in (REPOSITORY / package).rglob("*.py"))

MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "jsonpickle", "joblib"}
CALLS = {"eval", "exec", "__import__"}
METHODS = {
    *("torch.load", "yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "np.load", "numpy.load"),
    *("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
}
TYPED = {"msgspec.msgpack.Decoder": 0, "msgspec.json.Decoder": 0, "msgspec.msgpack.decode": 1, "msgspec.json.decode": 1}
"""Where among the arguments the type may stand, if it is not named."""


def relative(path):
    return str(path.relative_to(REPOSITORY))


TREES = {relative(path): list(ast.walk(ast.parse(path.read_text()))) for path in FILES}


def imported(nodes):
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]


def calls():
    """(file, name as it is written, the call)."""
    for path, nodes in TREES.items():
        yield from ((path, ast.unparse(node.func), node) for node in nodes if isinstance(node, ast.Call))


def test_the_files_were_found():
    assert len(TREES) > 100


def test_nothing_is_unpickled_or_evaluated_but_the_calls_between_an_actor_and_its_own_service():
    folder = "cluster/runtime/service_process"
    assert [path for path, nodes in TREES.items() if MODULES & set(imported(nodes))] == [f"{folder}/calls.py"]
    assert {path for path, nodes in TREES.items() if "socket" in imported(nodes) and path.startswith(folder)} == {
        f"{folder}/{name}.py" for name in ("calls", "child", "launch")
    }
    # multiprocessing's Connection unpickles what it receives
    assert {path for path, name, _ in calls() if name.rpartition(".")[2] == "Connection"} == {f"{folder}/child.py"}
    made = [(path, ast.unparse(call)) for path, name, call in calls() if name == "socket.socket"]
    assert {how for path, how in made if path.startswith(folder)} == {
        "socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)",
        "socket.socket(fileno=int(sys.argv[1]))",
    }
    forbidden = CALLS | METHODS
    assert not [(path, name) for path, name, _ in calls() if {name, name.rpartition(".")[2]} & forbidden]


def test_only_the_transfer_benchmark_has_a_pipe_that_unpickles_and_its_other_end_is_its_own_child():
    assert {path for path, name, _ in calls() if name.rpartition(".")[2] == "Pipe"} == {"kv_transfer/measure.py"}


def test_every_msgspec_decoder_names_a_type_and_the_type_is_not_any():
    checked = 0
    for path, name, call in calls():
        if name not in TYPED:
            continue
        named = [keyword.value for keyword in call.keywords if keyword.arg == "type"]
        kinds = [*named, *call.args[TYPED[name] :]]
        assert kinds, f"{path}: {ast.unparse(call)}"
        assert ast.unparse(kinds[0]) not in ("Any", "object", "dict", "list"), f"{path}: {ast.unparse(call)}"
        checked += 1
    assert checked > 8


def test_ports_and_channels_are_made_in_one_place():
    makers = {"add_insecure_port", "add_secure_port", "insecure_channel", "secure_channel"}
    assert {path for path, name, _ in calls() if name.rpartition(".")[2] in makers} == {"contracts/rpc/channel.py"}


def test_no_default_listens_on_every_interface():
    everywhere = {"0.0.0.0", "::", "[::]", "*"}
    other_meaning = {  # every origin, every header, and a layer of attention in Nemotron's patterns
        ("roofline/hf_config.py", "*"),
        ("router/settings.py", "*"),
        ("router/front/middleware/auth.py", "*"),
    }
    for path, nodes in TREES.items():
        texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        assert not {(path, text) for text in texts & everywhere} - other_meaning


def test_every_grpc_end_bounds_its_messages_both_ways():
    for options in (OPTIONS, grpc_methods.server_options(1 << 20), grpc_methods.channel_options(1 << 20)):
        limits = dict(options)
        assert 0 < limits["grpc.max_send_message_length"] <= 64 << 20
        assert 0 < limits["grpc.max_receive_message_length"] <= 64 << 20


def test_no_client_of_ours_goes_through_a_proxy_of_the_shell():
    made = {"httpx.AsyncClient", "httpx.Client", "httpx.get", "httpx.post", "httpx.stream"}
    clients = [(path, call) for path, name, call in calls() if name in made]
    assert len(clients) > 3
    assert [path for path, call in clients if "trust_env=False" not in map(ast.unparse, call.keywords)] == []
    opened = {path for path, name, _ in calls() if name.startswith("grpc.") and name.endswith("secure_channel")}
    assert opened == {"contracts/rpc/channel.py"}, "which sets the option that keeps gRPC from the proxy"
    assert {path for path, nodes in TREES.items() if {"urllib3", "requests"} & set(imported(nodes))} == set()
    assert {path for path, name, _ in calls() if name.endswith("urlopen")} == set()
