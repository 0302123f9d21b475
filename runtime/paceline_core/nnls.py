"""Least squares without negative coefficients, for a few columns and some thousand rows. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul

__all__ = ["fit_to_ones"]


def fit_to_ones(columns: Sequence[Sequence[float]]) -> list[float]:
    """Return the c ≥ 0 that minimise Σ (Σ c · column − 1)² over the rows: with each row divided by what was measured, the
    fit of least relative errors.
    """
    gram = [[sum(map(mul, a, b)) for b in columns] for a in columns]
    norms = [gram[i][i] ** 0.5 or 1.0 for i in range(len(columns))]  # columns differ by many orders of magnitude
    scaled = [[value / (n * m) for value, m in zip(row, norms, strict=True)] for row, n in zip(gram, norms, strict=True)]
    target = [sum(column) / norm for column, norm in zip(columns, norms, strict=True)]
    return [c / norm for c, norm in zip(_nnls(scaled, target), norms, strict=True)]


def _nnls(gram: list[list[float]], target: list[float]) -> list[float]:
    """Solve min ‖Ax − b‖, x ≥ 0, from AᵀA and Aᵀb by Lawson and Hanson's active set method (1974)."""
    width = len(target)
    x = [0.0] * width
    active: set[int] = set()
    for _ in range(3 * width):
        gradient = [target[i] - sum(gram[i][j] * x[j] for j in range(width)) for i in range(width)]
        candidate = max((i for i in range(width) if i not in active), key=gradient.__getitem__, default=None)
        if candidate is None or gradient[candidate] <= 1e-9 * max(map(abs, target)):
            break
        active.add(candidate)
        x = _settle(gram, target, x, active)
    return x


def _settle(gram: list[list[float]], target: list[float], x: list[float], active: set[int]) -> list[float]:
    """Solve on the active set; drop what would turn negative until nothing does."""
    while active:
        order = sorted(active)
        solution = dict(zip(order, _solve(gram, target, order), strict=True))
        negative = [i for i in order if solution[i] <= 0]
        if not negative:
            return [solution.get(i, 0.0) for i in range(len(x))]
        step = min(x[i] / (x[i] - solution[i]) if x[i] > solution[i] else 0.0 for i in negative)
        x = [v + step * (solution.get(i, 0.0) - v) if i in active else 0.0 for i, v in enumerate(x)]
        active.difference_update({i for i in negative if x[i] <= 1e-15})
    return [0.0] * len(x)


def _solve(gram: list[list[float]], target: list[float], order: list[int]) -> list[float]:
    """Solve the normal equations on the chosen columns by Gaussian elimination with pivoting."""
    size = len(order)
    # a breath of ridge keeps columns that were never varied apart (all steps alike) from making the system singular
    matrix = [[gram[i][j] + (1e-12 if i == j else 0.0) for j in order] + [target[i]] for i in order]
    for column in range(size):
        pivot = max(range(column, size), key=lambda r: abs(matrix[r][column]))
        matrix[column], matrix[pivot] = matrix[pivot], matrix[column]
        for row in range(column + 1, size):
            factor = matrix[row][column] / matrix[column][column]
            matrix[row] = [a - factor * b for a, b in zip(matrix[row], matrix[column], strict=True)]
    result = [0.0] * size
    for row in range(size - 1, -1, -1):
        rest = sum(matrix[row][k] * result[k] for k in range(row + 1, size))
        result[row] = (matrix[row][size] - rest) / matrix[row][row]
    return result
