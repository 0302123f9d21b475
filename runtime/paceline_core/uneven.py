"""A device whose steps don't follow the linear step-time model: for the clock runner and for tests of what is tuned on it.

Real devices compute batches in tiles (the ninth sequence of a kernel with tiles of eight costs as much as the sixteenth),
slow down once the KV that a step reads leaves a cache, and do some of the computing while they wait for memory. A model that
is fitted on linear features sees none of it, which is what a tuner has to live with.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline_core.errors import FormatError
from paceline_core.plan import StepShape
from paceline_core.step_time import StepModel
from paceline_core.wire import StepModelDocument

__all__ = ["UnevenDevice", "tiled"]

_RANGES = {
    "batchTile": (1, 1 << 20), "prefillTile": (1, 1 << 20), "contextKnee": (1, float("inf")),
    "contextFactor": (1, float("inf")), "overlap": (0, 1),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class UnevenDevice:
    """A `StepPredictor`: `base` on decodes and prefill tokens rounded up to tiles, and dearer context beyond a knee.

    Each KV position that a step reads beyond the knee costs `context_factor` times one before it. Of computing and reading
    the shorter is hidden behind the longer, the share `overlap` of it: 0 adds them up, 1 is the roofline of S. Williams,
    A. Waterman and D. Patterson (CACM 52, 2009). More work never takes less time.
    """

    base: StepModel
    batch_tile: int = 1
    prefill_tile: int = 1
    context_knee: float = float("inf")
    context_factor: float = 1.0
    overlap: float = 0.0

    @property
    def constant(self) -> float:
        """Seconds that any step takes."""
        return self.base.constant

    @property
    def residual(self) -> float:
        """Its own error: none, it is the device."""
        return 0.0

    def predict(self, shape: StepShape) -> float:
        """Return the seconds of a step."""
        base = self.base
        prompts = base.prefill_tokens * tiled(shape.prefill_tokens, self.prefill_tile)
        prompts += base.prefill_attention * shape.prefill_attention
        return self._seconds(shape.decode_tokens, prompts, shape.context_tokens)

    def predict_decode(self, sequences: int, context_tokens: int) -> float:
        """Return, to the last bit, what `predict` says of a step of this many decodes."""
        return self._seconds(sequences, 0.0, context_tokens)

    def _seconds(self, sequences: int, prompts: float, context_tokens: int) -> float:
        computing = self.base.decode_tokens * tiled(sequences, self.batch_tile) + prompts
        reading = self.base.context_tokens * self._context(context_tokens)
        return self.base.constant + max(computing, reading) + (1.0 - self.overlap) * min(computing, reading)

    def outside(self, shape: StepShape) -> tuple[str, ...]:
        """Return nothing: it is defined everywhere."""
        return ()

    def _context(self, tokens: int) -> float:
        beyond = tokens - self.context_knee
        return tokens + (self.context_factor - 1.0) * beyond if beyond > 0 else tokens

    @classmethod
    def from_document(cls, document: StepModelDocument) -> UnevenDevice:
        """Read the wire form, whose `uneven` holds what isn't linear. Raises `FormatError` that names the field."""
        given = document.uneven
        if unknown := sorted(set(given) - set(_RANGES)):
            raise FormatError(f"step model: uneven names {', '.join(unknown)}, expected {', '.join(_RANGES)}")
        for name, value in given.items():
            low, high = _RANGES[name]
            if not low <= value <= high:
                raise FormatError(f"step model: uneven.{name} is {value!r}, expected {low} to {high}")
        knee, factor = given.get("contextKnee", float("inf")), given.get("contextFactor", 1.0)
        tiles = int(given.get("batchTile", 1)), int(given.get("prefillTile", 1))
        return cls(StepModel.from_document(document), *tiles, knee, factor, given.get("overlap", 0.0))


def tiled(count: int, tile: int) -> int:
    """Return `count` rounded up to whole tiles."""
    return -(-count // tile) * tile
