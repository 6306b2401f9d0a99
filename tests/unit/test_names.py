"""Names of modules and of classes are used once in the product."""

from __future__ import annotations

import ast
from collections import defaultdict

from tests.unit.test_structure import modules

SHARED_MODULES = {
    *(
        "calibration",
        "client",
        "decisions",
        "errors",
        "handler",
        "host",
        "messages",
        "names",
        "plan",
        "policy",
        "puller",
    ),
    *("rates", "replay", "roles", "sampling", "server", "shape", "source", "stream", "worker"),
}
"""Names of modules that are used more than once: no new ones."""


def test_no_two_modules_and_no_two_classes_of_the_product_share_a_name():
    names, classes = defaultdict(list), defaultdict(list)
    for path in modules():
        names[path.stem].append(path)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name].append(path)
    del names["__init__"]
    assert {name for name, paths in names.items() if len(paths) > 1} <= SHARED_MODULES
    assert not {name for name, paths in classes.items() if len(paths) > 1}
