"""Who a worker is, how it is doing, and the calls that are not tasks.

Fields are only ever added, as in `contracts/tasks.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean
from typing import Annotated

import msgspec

from ridgeline.contracts.handoff import KvHandoff, KvLayout
from ridgeline.contracts.tasks import Adapter, GenerateTask
from ridgeline.contracts.vocabulary import Mode, Pool


class StepModel(msgspec.Struct, frozen=True, kw_only=True):
    """How long a step of a worker's engine takes, as fitted to its own steps (`ridgeline.decode_worker.pacing`).

    t = (base + a P + b S + c C + d A) k, where P are the prompt tokens that the step computes, S the tokens of
    sequences that decode in it (one each; with speculation the drafted ones too), C the context tokens of these
    sequences together, A the sum over the chunks of prompts of (chunk tokens x (tokens before the chunk + half of the
    chunk)), and k corrects for the stairs that CUDA graphs and tiles make of a line.
    """

    base_s: float
    per_prefill_token_s: float
    per_sequence_s: float
    per_context_token_s: float
    per_attended_token_s: float
    corrections: tuple[float, ...] = ()
    """k for steps of n tokens (P + S) at index n.bit_length(); 1 beyond its end."""
    error: float = 0.0
    """Median of |predicted - measured| / measured over the latest steps, each predicted before it was fitted."""
    steps: int = 0
    """Number of steps that it was fitted to; it means nothing before `MIN_FITTED_STEPS`."""
    knows_decode: bool = True
    """Whether enough of them had no prompt tokens: a fit to prompts alone may find that decoding takes nothing."""
    knows_prompts: bool = True
    """Whether any of them had prompt tokens; if none had, what these add is a guess."""
    computed_per_sequence: float = 1.0
    """Tokens that a step computes of each sequence that decodes: above 1 with speculation."""
    made_per_sequence: float = 1.0
    """Tokens that such a sequence gets of a step: one, and the drafted ones that were accepted."""
    most_decode_tokens: int = 0
    """S of the largest step that it was fitted to; 0: not known, as of C."""
    most_context_tokens: int = 0

    def step_s(self, prefill_tokens: float, decode_tokens: float, context_tokens: float, attended: float) -> float:
        """Return the seconds of a step with these P, S, C and A."""
        line_s = (
            self.base_s
            + self.per_prefill_token_s * prefill_tokens
            + self.per_sequence_s * decode_tokens
            + self.per_context_token_s * context_tokens
            + self.per_attended_token_s * attended
        )
        return line_s * self.correction(prefill_tokens + decode_tokens)

    def decode_s(self, sequences: float, context_tokens: float) -> float:
        """Return the seconds of a step without prompt tokens, for so many sequences and this C."""
        tokens = sequences * self.computed_per_sequence
        line_s = self.base_s + self.per_sequence_s * tokens + self.per_context_token_s * context_tokens
        if self.corrections:
            line_s *= self.correction(tokens)
        return line_s if line_s > SHORTEST_STEP_S else SHORTEST_STEP_S

    @property
    def is_whole(self) -> bool:
        """Whether it has seen both prompts and decoding."""
        return self.knows_decode and self.knows_prompts

    def completed_by(self, others: Iterable[StepModel]) -> StepModel | None:
        """Return the model, with what it has not seen taken from one of the others that has; None if none has."""
        known = self
        for other in others:
            if not known.knows_decode and other.knows_decode:
                known = msgspec.structs.replace(
                    known,
                    base_s=other.base_s,
                    per_sequence_s=other.per_sequence_s,
                    per_context_token_s=other.per_context_token_s,
                    computed_per_sequence=other.computed_per_sequence,
                    made_per_sequence=other.made_per_sequence,
                    knows_decode=True,
                )
            if not known.knows_prompts and other.knows_prompts:
                known = msgspec.structs.replace(
                    known,
                    per_prefill_token_s=other.per_prefill_token_s,
                    per_attended_token_s=other.per_attended_token_s,
                    knows_prompts=True,
                )
        return known if known.is_whole else None

    def times(self, factor: float, prompts: float | None = None) -> StepModel:
        """Return the model of steps that take so many times as long; what prompts add to them, `prompts` if given."""
        prompts = factor if prompts is None else prompts
        return msgspec.structs.replace(
            self,
            base_s=factor * self.base_s,
            per_prefill_token_s=prompts * self.per_prefill_token_s,
            per_sequence_s=factor * self.per_sequence_s,
            per_context_token_s=factor * self.per_context_token_s,
            per_attended_token_s=prompts * self.per_attended_token_s,
        )

    def in_order(self) -> StepModel:
        """Return the model with corrections by which no batch decodes faster than a smaller one.

        Each size is corrected by its own latest steps, so on a busy machine those of one size may look slow for good.
        Sizes that are out of order get their mean time (pool adjacent violators: Barlow et al. 1972).
        """
        sizes = min(len(self.corrections), 1 + (self.most_decode_tokens or USUAL_BATCH).bit_length())
        line_s = [self.base_s + self.per_sequence_s * 0.75 * (1 << bits) for bits in range(1, sizes)]
        pooled: list[list[float]] = []
        for one_s, k in zip(line_s, self.corrections[1:sizes], strict=True):
            pooled.append([one_s * k])
            while len(pooled) > 1 and fmean(pooled[-2]) > fmean(pooled[-1]):
                pooled[-2:] = [pooled[-2] + pooled[-1]]
        times_s = [fmean(run) for run in pooled for _ in run]
        ordered = (time_s / max(one_s, SHORTEST_STEP_S) for time_s, one_s in zip(times_s, line_s, strict=True))
        return msgspec.structs.replace(
            self, corrections=(*self.corrections[:1], *ordered, *self.corrections[max(1, sizes) :])
        )

    def planned_s(self, target_s: float) -> float:
        """Return what a step is planned to take to keep a target: less by as much as predictions err, up to a limit."""
        return target_s / (1.0 + min(self.error, MOST_MARGIN))

    def correction(self, tokens: float) -> float:
        """Return k for a step of so many tokens."""
        bucket = int(tokens).bit_length()
        return self.corrections[bucket] if bucket < len(self.corrections) else 1.0


SHORTEST_STEP_S = 1e-6
"""No step is predicted to take less, so that predictions may divide by it: no engine makes one in a microsecond, and a
fit to few steps may find that some take nothing."""


USUAL_BATCH = 64
"""Sequences in the batches of a model that does not know its largest one."""


MIN_FITTED_STEPS = 16
"""A model that was fitted to fewer steps is not used."""


MOST_MARGIN = 0.1
"""The most by which a target on steps exceeds what is planned: with more, prompts would hardly go on while a model errs
much."""
TPOT_LIMIT_USED = 0.95
"""The part of a limit on TPOT that engines use, and routers predict with; the rest is for steps that take longer than
predicted."""
MOST_LIMITS = 2.0
"""A step takes at most so many limits on TPOT, however far all sequences are ahead: a reader sees the gap."""
LOST_LIMITS = 4.0
"""How many of its limits a step may take for a sequence that can no longer keep its limit; if a step of all that decode
takes longer than the limit, how many of these."""
FUTURE_SLACK_USED = 0.5
"""The fraction of a sequence's future TPOT slack that prompts may use, counted over its P25 output length."""
DECODE_STEP_MARGIN = 1.1
"""Steps without prompts count as this times what is predicted when future slack is used: slack that was used and does
not come makes a sequence late for good. A limit of which less is used than this counts as one that no
step can keep: a tenth is as much as predictions may err, and beside a smaller one each prompt takes more than 11 times
as long as alone."""
LEAST_PROMPT_SHARE = 0.02
"""Prompts may always lengthen a step by this share of its decode part, so that they go on whatever limits there are."""


class Role(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is for at present. The router decides, and may change it while the worker serves.

    A worker runs every leg in every role: its role says which legs the router sends there, and how much one step of its
    engine may hold. The worker only keeps it, so that a router that has been started again finds the mode it was in.
    """

    mode: Mode
    pool: Pool
    max_num_seqs: int
    """Sequences that its engine runs at a time."""
    max_num_batched_tokens: int
    """Tokens that one step of its engine computes."""
    step_target_s: float = 0.0
    """While sequences decode, a step computes only as many prompt tokens as fit this time; 0: no such limit."""
    number: int = 0
    """Counts the changes of mode; of several roles the one with the highest number is the newest."""


class WorkerDescription(msgspec.Struct, frozen=True, kw_only=True):
    """Who a worker is; read once when the router connects."""

    worker_id: str
    incarnation: str
    pool: Pool
    """The pool for which it was started."""
    pid: int
    host: str
    """The address at which its KV source and its data plane listen."""
    layout: KvLayout
    transfer_addresses: list[str]
    """Addresses at which its KV blocks can be fetched, one for each tensor parallel rank."""
    num_kv_blocks: int
    prefix_block_tokens: int
    """Tokens by which its prefix cache has hits, in one block of which a recurrent state may fill; 0: it keeps none."""
    max_model_len: int
    max_num_seqs: int
    """Sequences that its engine can run at a time."""
    repeats_tokens: bool = True
    """Whether it can go on after emitted tokens in `resample` mode."""
    role: Role | None = None
    """The role that a router has given it; None if none has yet."""
    node: str = ""
    """Equal for workers that can share memory; empty if not known."""
    rack: str = ""
    """Equal for workers in one rack; empty if not known."""
    max_loras: int = 0
    """LoRA adapters that one step of its engine may have; 0: it takes none."""
    max_cpu_loras: int = 0
    """Adapters that its engine keeps in memory; another one it reads from disk."""
    adapters: tuple[Adapter, ...] = ()
    """Those that it can be asked for now."""
    device: str = ""
    """Equal for workers of one node that take turns on the same cores or GPUs; empty if not known."""

    @property
    def most_prefix_blocks(self) -> int:
        """How many blocks of prompts its prefix cache keeps at most.

        All groups of layers share the pool. What has left a window, and the states at the ends of steps, stay there
        until room is needed, as the tokens of other layers do.
        """
        sizes = [group.block_size for group in self.layout.groups] or [self.layout.block_size]
        taken = sum(self.prefix_block_tokens / size for size in sizes)
        return int(self.num_kv_blocks / taken) if taken else 0


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker is doing: gauges now, counters since its start (names ending in `_total`)."""

    worker_id: str
    running: int = 0
    waiting: int = 0
    tasks: int = 0
    kv_blocks_free: int = 0
    kv_blocks_total: int = 0
    counters: dict[str, float] = msgspec.field(default_factory=dict)
    """Flat names, as the scheduler side and the worker side of the connector count them."""
    draining: bool = False
    engine_failed: bool = False
    stale_handoffs: list[str] = msgspec.field(default_factory=list)
    """The lives of the oldest hand-offs that have not been released for long, a sentence each."""
    stalled_s: float = 0.0
    """Seconds since the engine's last step, while it has work; 0 without work."""
    incarnation: str = ""
    role_number: int = 0
    """The number of its role; 0 if no router has given it one."""
    step_model: StepModel | None = None
    """None while it has not run enough steps."""


class AttachRequest(msgspec.Struct, frozen=True):
    """A router opens its one stream of step batches."""

    router_id: str


class SubmitRequest(msgspec.Struct, frozen=True):
    """A router gives a worker one task; its deltas come on the attached stream."""

    router_id: str
    task: GenerateTask


class AbortRequest(msgspec.Struct, frozen=True):
    """A router no longer wants these requests; unknown ids are ignored."""

    router_id: str
    request_ids: list[str]


class PairRequest(msgspec.Struct, frozen=True):
    """A router tells a decode worker which sources it will fetch from, and perhaps which transport to use."""

    addresses: list[str]
    transport: str | None = None


class PairAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """For each source: the transport and why no better one is possible, or why there can be no hand-off."""

    paired: dict[str, tuple[str, str]]
    refused: dict[str, str]


class OfferRequest(msgspec.Struct, frozen=True):
    """A router asks what a worker's prefix cache has of the prompt that a task of another worker is to compute."""

    task: GenerateTask


class Offer(msgspec.Struct, frozen=True):
    """What the cache has, leased for a few seconds to one reader; None if that is nothing."""

    handoff: KvHandoff | None = None


class LoadAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """Tells a worker to have a LoRA adapter; without a digest, whatever lies at its path now."""

    name: str
    path: str
    digest: str = ""


class AdapterLoaded(msgspec.Struct, frozen=True, kw_only=True):
    """The adapter that the worker has now, or a sentence that says why not."""

    adapter: Adapter | None = None
    refused: str = ""


class UnloadAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """Tells a worker that an adapter is not asked for any more, except by requests that run; these end in `after_s`."""

    adapter: Adapter
    after_s: Annotated[float, msgspec.Meta(ge=0)]


class DrainRequest(msgspec.Struct, frozen=True):
    """Tells a worker to leave.

    It takes no new tasks, gives the running ones `timeout_s`, and waits until nobody needs its KV any more.
    """

    timeout_s: float


class Ack(msgspec.Struct, frozen=True):
    """The worker has received the message."""

    accepted: bool = True
    reason: str = ""
    attached: bool = True
    """For a task that was not accepted: whether the worker has a stream of this router."""
