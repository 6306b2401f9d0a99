"""The published schema of summary.json."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import msgspec

SCHEMA_FILE = Path(__file__).parents[2] / "docs" / "reference" / "summary.schema.json"
VALIDATOR = jsonschema.Draft202012Validator(json.loads(SCHEMA_FILE.read_text()))


def schema_problems(summary: Any) -> list[str]:
    """Say where a summary, as it is written to its file, differs from the schema."""
    written = json.loads(msgspec.json.encode(summary))
    return [f"{error.json_path}: {error.message}" for error in VALIDATOR.iter_errors(written)]
