"""A step-time model in tiles, and with a knee in context: what the devices do that no linear model says. Pure.

Reading keys and values costs more per token where they no longer fit a cache. A linear model that has seen both sides of
such a knee spreads what is beyond it over all features: steps of many sequences with short contexts, and of small chunks,
are then said to take half as long again as they do, and settings that would bring them look bad before they were ever tried.
And kernels work on tiles of rows: where a tile holds eight, a ninth sequence costs as much as a sixteenth, and 26 slots
serve hardly more than 24, but slower.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from operator import mul

from paceline_core.nnls import fit_to_ones
from paceline_core.plan import StepShape
from paceline_core.step_time import FEATURES, StepModel
from paceline_core.uneven import tiled

__all__ = ["BentModel", "bend"]

_FEWEST = 64  # measured steps
_KNEES = tuple(2.0 ** (-i / 4) for i in range(1, 21))  # of the longest context: where a knee is looked for
_TILES = tuple(product((1, 4, 8, 16, 32), (1, 16, 32, 64, 128, 256)))  # rows of decodes, tokens of prompts
_CLEARLY = 0.7  # of the squared errors: a bend, or tiles, that leave more of them are none
_RIGHT = 1e-3  # relative error of a fit that has nothing to explain


@dataclass(frozen=True, slots=True)
class BentModel(StepModel):
    """A `StepModel` of which each context token beyond `knee` costs `beyond` seconds more, and decodes and prompt tokens are
    computed in whole tiles.
    """

    knee: float = 0.0
    beyond: float = 0.0
    batch_tile: int = 1
    prefill_tile: int = 1

    def predict(self, shape: StepShape) -> float:
        """Return the predicted seconds of a step."""
        prompts = self.prefill_tokens * tiled(shape.prefill_tokens, self.prefill_tile)
        attention = self.prefill_attention * shape.prefill_attention
        return self.predict_decode(shape.decode_tokens, shape.context_tokens) + prompts + attention

    def predict_decode(self, sequences: int, context_tokens: int) -> float:
        """Return, to the last bit, what `predict` says of a step of this many decodes."""
        tile, beyond = self.batch_tile, context_tokens - self.knee
        rows = sequences if tile == 1 else -(-sequences // tile) * tile
        seconds = self.constant + self.decode_tokens * rows + self.context_tokens * context_tokens
        return seconds + self.beyond * beyond if beyond > 0 else seconds


def bend(model: StepModel, steps: Sequence[tuple[StepShape, float]]) -> StepModel:
    """Return a model with a knee and with tiles fitted to `steps` (shape, seconds), each only if it explains them clearly
    better; `model` as it is if neither does.

    The knee is a hinge of J. H. Friedman's regression splines ("Multivariate adaptive regression splines", Annals of
    Statistics 1991). Its place and the tiles are found by search, the coefficients by non-negative least squares on relative
    errors. What `model` has seen stays said.
    """
    longest = max((shape.context_tokens for shape, _ in steps), default=0)
    if len(steps) < _FEWEST or not longest:
        return model
    fits = _Fits(steps)
    knees = [share * longest for share in _KNEES]
    best = fits.best(fits.plain, ((1, 1, knee) for knee in knees))
    best = fits.best(best, ((*tiles, best.knee) for tiles in _TILES))
    if best.tiles != (1, 1):  # they blur where the knee is, and may have looked like one
        best = fits.best(fits.of(*best.tiles, 0.0), ((*best.tiles, knee) for knee in knees))
    if best is fits.plain:
        return model
    constant, *slopes = best.coefficients
    own = dict(zip(FEATURES, slopes, strict=False))
    beyond = slopes[len(FEATURES)] if best.knee else 0.0
    return BentModel(
        constant,
        **own,
        residual=model.residual,
        steps=model.steps,
        seen=model.seen,
        knee=best.knee,
        beyond=beyond,
        batch_tile=best.tiles[0],
        prefill_tile=best.tiles[1],
    )


@dataclass(frozen=True, slots=True)
class _Fit:
    """What tiles and a knee (0: none) leave of squared relative errors, with the best coefficients."""

    loss: float
    tiles: tuple[int, int]
    knee: float
    coefficients: tuple[float, ...]


class _Fits:
    """The best fit for given tiles and knee."""

    def __init__(self, steps: Sequence[tuple[StepShape, float]]) -> None:
        self._steps = steps
        self._column = cache(self._tiled)
        self._constant = [1.0 / seconds for _, seconds in steps]
        self.plain = self.of(1, 1, 0.0)

    def best(self, so_far: _Fit, others: Iterable[tuple[int, int, float]]) -> _Fit:
        """Return the best of `others` if it is clearly better than `so_far`; what leaves nothing to explain stays."""
        if so_far.loss <= len(self._steps) * _RIGHT**2:
            return so_far
        found = min((self.of(*other) for other in others), key=lambda fit: fit.loss)
        return found if found.loss <= _CLEARLY * so_far.loss else so_far

    def of(self, batch_tile: int, prefill_tile: int, knee: float) -> _Fit:
        """Return the fit for these tiles and this knee."""
        tiles = {"decode_tokens": batch_tile, "prefill_tokens": prefill_tile}
        columns = [self._constant, *(self._column(name, tiles.get(name, 1)) for name in FEATURES)]
        if knee:
            columns.append([max(0.0, shape.context_tokens - knee) / seconds for shape, seconds in self._steps])
        found = fit_to_ones(columns)
        loss = sum((sum(map(mul, found, row)) - 1.0) ** 2 for row in zip(*columns, strict=True))
        return _Fit(loss, (batch_tile, prefill_tile), knee, tuple(found))

    def _tiled(self, name: str, tile: int) -> list[float]:
        return [tiled(getattr(shape, name), tile) / seconds for shape, seconds in self._steps]
