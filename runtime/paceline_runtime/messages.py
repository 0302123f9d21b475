"""What the API process and the engine process say to each other: msgspec structs as MessagePack over ZeroMQ.

```
API → engine   AddSequence  AbortSequence  SetKnobs  SetTimeline  CloseSource
engine → API   EngineReady  EngineFailed  StepOutput  KnobsApplied  KnobsRefused  Heartbeat
```
Every `AddSequence` is answered by exactly one `SequenceEnded` (inside a `StepOutput`), or by the death of the engine
process, which the API process sees. Times are `time.monotonic()`, which both processes share.
"""

from __future__ import annotations

from typing import Any

import msgspec

from paceline_core.request import FinishReason
from paceline_core.wire import Gauges, StepModelDocument
from paceline_runtime.sampling_params import SamplingParams
from paceline_runtime.step_result import PromptReport, TokenLogprobs

__all__ = [
    "AbortSequence",
    "AddSequence",
    "CloseSource",
    "EngineFailed",
    "EngineReady",
    "FromEngine",
    "GrammarsReady",
    "Heartbeat",
    "KnobsApplied",
    "KnobsRefused",
    "SequenceEnded",
    "SetKnobs",
    "SetTimeline",
    "StepOutput",
    "StepStatistics",
    "ToEngine",
    "decode_from_engine",
    "decode_to_engine",
    "encode",
]


class AddSequence(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Generate from `tokens`. `deadline` is when the first token stops being useful; `salt` keeps cached blocks apart.

    `submitted` is when it was sent, after `arrival` by what reading and tokenising it took.
    """

    seq_id: int
    tokens: list[int]
    params: SamplingParams
    arrival: float
    priority: int = 0
    deadline: float | None = None
    salt: int = 0
    submitted: float | None = None


class AbortSequence(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Stop a sequence: its client left, or (`STOP`) its text reached a stop string. Unknown ids are no error."""

    seq_id: int
    reason: FinishReason


class SetKnobs(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Put `knobs` (every knob, wire form) in force; answered by `KnobsApplied` with the same `revision`."""

    revision: int
    knobs: dict[str, Any]


class CloseSource(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """No more sequences will come: static batching need not wait for a full batch any more."""


class SetTimeline(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Say with each step who was in it, or stop doing so."""

    on: bool


class GrammarsReady(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """From a thread of the engine process to its loop: grammars are compiled, their sequences can be added."""


ToEngine = AddSequence | AbortSequence | SetKnobs | SetTimeline | CloseSource | GrammarsReady


class SequenceEnded(msgspec.Struct, frozen=True, array_like=True):
    """The end of a sequence (see `paceline_core.request.Ended`). `refusal` says why it was refused, in words.

    `parts` are the seconds of `paceline_core.causes.PARTS`, in that order (none for one that never came in).
    `delayed_by` and `preempted_by` hold the worst culprits, by sequence.
    """

    seq_id: int
    reason: FinishReason
    output_len: int
    released: float
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    cached_len: int = 0
    preemptions: int = 0
    epoch: int = 0
    end_epoch: int = 0
    refusal: str = ""
    refusal_code: str = ""
    parts: tuple[float, ...] = ()
    delayed_by: dict[int, float] = {}  # msgspec makes a new one each time
    preempted_by: dict[int, float] = {}


class StepStatistics(msgspec.Struct, frozen=True, array_like=True):
    """One step: when it ended (monotonic), seconds, knob epoch, and its shape (see `StepShape`)."""

    end: float
    duration: float
    epoch: int
    decode_tokens: int
    prefill_tokens: int
    context_tokens: int
    prefill_attention: int


class StepOutput(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What came of one turn of the engine loop: new tokens per sequence, ends, and the step if one completed.

    `logprobs` (one for each of the tokens) and `prompts` are there for the sequences that asked for them. `members` are the
    sequences of the step with their tokens and whether those are a prompt's, if a timeline is wanted.
    """

    tokens: dict[int, tuple[int, ...]]
    ended: list[SequenceEnded]
    gauges: Gauges
    step: StepStatistics | None = None
    logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
    prompts: dict[int, PromptReport] = {}
    members: list[tuple[int, int, bool]] | None = None


class EngineReady(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The model is loaded. `eos_token_ids` end a generation unless the client ignores them."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    num_blocks: int
    device: str
    epoch: int


class EngineFailed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The engine can't start, and trying again won't help (bad model, no memory): one line for people."""

    message: str


class KnobsApplied(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The knobs of `revision` are in force from `epoch` on; `num_blocks` is the size of the KV pool now."""

    revision: int
    epoch: int
    num_blocks: int


class KnobsRefused(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The engine can't run under the knobs of `revision` (no memory for such a pool); the ones before stay in force."""

    revision: int
    message: str


class Heartbeat(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Sent by the watchdog thread of the engine process. `stalled` counts seconds without a step while work is pending.

    `expected` is what the step-time model says of the step that runs.
    """

    steps: int
    stalled: float
    step_model: StepModelDocument | None = None
    expected: float = 0.0


FromEngine = EngineReady | EngineFailed | StepOutput | KnobsApplied | KnobsRefused | Heartbeat

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine) -> bytes:
    """Return `message` as MessagePack."""
    return _encoder.encode(message)


def decode_to_engine(data: bytes) -> ToEngine:
    """Return a message from the API process. Raises `msgspec.ValidationError` if it is none."""
    message: ToEngine = _to_engine.decode(data)
    return message


def decode_from_engine(data: bytes) -> FromEngine:
    """Return a message from the engine process. Raises `msgspec.ValidationError` if it is none."""
    message: FromEngine = _from_engine.decode(data)
    return message
