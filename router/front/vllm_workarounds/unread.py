"""Counts the outputs that a client has not read; `router/front/middleware/http_protocol.py` limits them.

vLLM's collector merges them without a limit, and drops the prompt's log-probabilities if a later sequence brings them.
"""

from __future__ import annotations

from vllm.outputs import PoolingRequestOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.output_processor import RequestOutputCollector

TOKEN_BYTES = 40
LOGPROB_BYTES = 250
"""Approximate size of one entry in memory."""


class CountingCollector(RequestOutputCollector):  # type: ignore[misc]
    """One request's outputs, merged and counted while its client does not read them."""

    def __init__(self, output_kind: RequestOutputKind, request_id: str) -> None:
        super().__init__(output_kind, request_id)
        self.unread_bytes = 0

    def put(self, output: RequestOutput | PoolingRequestOutput | Exception) -> None:
        """Store an output as vLLM does, and count it."""
        unread = self.output
        super().put(output)
        if isinstance(unread, RequestOutput) and isinstance(output, RequestOutput):
            # vLLM's merging drops those of a sequence that comes first now, and `echo` would not find them.
            unread.prompt_logprobs = unread.prompt_logprobs or output.prompt_logprobs
        if isinstance(self.output, Exception):
            self.unread_bytes = 0  # it replaces everything before it, and vLLM drops what still comes
        elif isinstance(output, RequestOutput):
            self.unread_bytes += _bytes(output)

    async def get(self) -> RequestOutput | PoolingRequestOutput:
        """Return what has come since the last call, waiting if there is nothing."""
        output = await super().get()
        self.unread_bytes = 0
        return output

    def get_nowait(self) -> RequestOutput | PoolingRequestOutput | None:
        """Return what has come since the last call; None if there is nothing."""
        output = super().get_nowait()
        self.unread_bytes = 0
        return output


def _bytes(output: RequestOutput) -> int:
    tokens, entries = 1, 0
    for one in output.outputs:
        tokens += len(one.token_ids)
        if one.logprobs:
            entries += sum(len(position) for position in one.logprobs if position)
    return TOKEN_BYTES * tokens + LOGPROB_BYTES * entries
