"""Requests that schemathesis generates from the server's own OpenAPI document: some that conform, more that do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import httpx
import requests
import schemathesis
from hypothesis import strategies as st
from schemathesis import GenerationMode

from tools.fuzz.http_bodies import DEADLINE_S, Answer, check_answer


def strategies(url: str) -> list[st.SearchStrategy[Any]]:
    """Return a strategy for each operation of the document."""
    answer = httpx.get(f"{url}/openapi.json", timeout=DEADLINE_S, trust_env=False).raise_for_status()
    document: dict[str, Any] = answer.json()
    schema = schemathesis.openapi.from_dict(document)
    operations: list[Any] = [cast(Any, found).ok() for found in schema.get_all_operations()]
    modes = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE, GenerationMode.NEGATIVE)
    return [
        st.one_of(*(operation.as_strategy(generation_mode=mode) for mode in modes if _offers(operation, mode)))
        for operation in operations
    ]


def _offers(operation: Any, mode: GenerationMode) -> bool:
    """Return whether the operation has cases in this mode: without body and parameters nothing can be wrong."""
    return mode is GenerationMode.POSITIVE or bool(operation.body or list(operation.iter_parameters()))


def case_check(url: str) -> Callable[[Any], None]:
    """Return a check that sends a case over a shared session and checks the answer like any other."""
    session = requests.Session()
    session.trust_env = False  # no proxy of the shell

    def check(case: Any) -> None:
        response = case.call(base_url=url, session=session, timeout=DEADLINE_S)
        try:
            check_answer(Answer(response.status_code, response.headers.get("content-type", [""])[0], response.content))
        except AssertionError as error:
            error.add_note(case.as_curl_command())
            raise

    return check
