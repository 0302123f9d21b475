"""KV blocks of sequences: given at admission and growth, shared by prefix, freed once no plan in flight reads them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from paceline_core.admission import AdmissionGuard
from paceline_core.blocks import ROOT, BlockPool, hash_block
from paceline_core.sequence import SequenceState

__all__ = ["KvCache"]


class KvCache:
    """Block tables over one pool, with the prefix cache and the frees that wait for plans in flight."""

    def __init__(self, num_blocks: int, block_size: int, *, caching: bool) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.guard = AdmissionGuard()
        self.growth = 0  # blocks that running sequences are predicted to need beyond those they hold
        self._caching = caching
        self._completed = -1
        self._deferred: deque[tuple[int, list[int]]] = deque()  # (last plan that names the table, table), in plan order

    @property
    def has_deferred(self) -> bool:
        """True while blocks wait for a plan in flight."""
        return bool(self._deferred)

    def blocks_for(self, positions: int) -> int:
        """Return how many blocks hold this many positions."""
        return -(-positions // self.block_size)

    def set_caching(self, caching: bool) -> None:
        """Switch prefix caching; switching it off empties the cache."""
        if self._caching and not caching:
            self.pool.forget_all()
        self._caching = caching

    def hash_known(self, seq: SequenceState) -> None:
        """Extend the hashes of `seq` to all full blocks of what is known; what is hashed already costs nothing."""
        if not self._caching:
            return
        request, hashes = seq.request, seq.hashes
        if request.tokens is None:
            if not hashes:
                given = request.prefix_hashes[: request.prompt_len // self.block_size]
                hashes.extend(hash_block(value, (), request.salt) if request.salt else value for value in given)
            return
        for index in range(len(hashes), seq.num_tokens // self.block_size):
            parent = hashes[-1] if hashes else ROOT
            hashes.append(hash_block(parent, seq.block_tokens(index, self.block_size), request.salt))

    def admit(self, seq: SequenceState, *, alone: bool) -> bool:
        """Give `seq` blocks for all its known tokens, shared where cached; False if it must wait.

        `alone` skips the guard's reservation: with nobody beside it a sequence always fits. At least one token stays to
        be computed, because a sample needs its logits.
        """
        shared = self._cached_prefix(seq)
        total = self.blocks_for(seq.known)
        growth = self._predicted_growth(seq, total)
        if not self._has_room(shared, total, growth, alone=alone):
            return False
        self.pool.share(shared)
        seq.block_table = [*shared, *self.pool.take(total - len(shared))]
        seq.capacity = total * self.block_size
        seq.computed = len(shared) * self.block_size
        seq.growth = growth
        self.growth += growth
        self._expect_full(seq, len(shared))
        return True

    def fits(self, seq: SequenceState) -> bool:
        """Return whether `admit` would take `seq` beside those that run. Changes nothing."""
        total = self.blocks_for(seq.known)
        return self._has_room(self._cached_prefix(seq), total, self._predicted_growth(seq, total), alone=False)

    def grow(self, seq: SequenceState, positions: int) -> bool:
        """Extend the table of `seq` to cover `positions`; False if blocks are lacking (then nothing changes)."""
        missing = self.blocks_for(positions) - len(seq.block_table)
        if missing > self.pool.num_available:
            return False
        if missing > 0:
            seq.block_table += self.pool.take(missing)
        foreseen = min(missing, seq.growth)
        seq.growth -= foreseen
        self.growth -= foreseen
        seq.capacity = len(seq.block_table) * self.block_size
        return True

    def register(self, seq: SequenceState, computed: int) -> None:
        """Make the blocks of `seq` findable that are full now that positions up to `computed` are in the cache."""
        if not self._caching:
            return
        self.hash_known(seq)
        full = min(computed // self.block_size, len(seq.hashes))
        for index in range(int(seq.next_full) // self.block_size - 1, full):
            self.pool.register(seq.block_table[index], seq.hashes[index])
        self._expect_full(seq, full)

    def release(self, seq: SequenceState) -> None:
        """Take the blocks of `seq` back, at once or when the last plan that names them has completed."""
        self.growth -= seq.growth
        if seq.last_step <= self._completed:
            self.pool.release(seq.block_table)
        elif seq.block_table:
            self._deferred.append((seq.last_step, seq.block_table))
        seq.rewind()

    def step_completed(self, step_id: int) -> None:
        """Note that this plan has completed and free what waited for it."""
        self._completed = step_id
        while self._deferred and self._deferred[0][0] <= step_id:
            self.pool.release(self._deferred.popleft()[1])

    def resize(self, num_blocks: int) -> None:
        """Replace the pool. Nothing may be held."""
        assert self.pool.num_used == 0, "the pool is resized while blocks are in use"
        self.pool = BlockPool(num_blocks)

    def check(self, running: Iterable[SequenceState]) -> None:
        """Assert conservation against the tables of `running` and of the frees that wait. O(blocks), for tests."""
        running = list(running)
        self.pool.check([*(seq.block_table for seq in running), *(table for _, table in self._deferred)])
        assert self.growth == sum(seq.growth for seq in running), "the predicted growth drifted"

    def _cached_prefix(self, seq: SequenceState) -> list[int]:
        self.hash_known(seq)
        reads = self._caching and seq.request.read_cache
        return self.pool.find(seq.hashes, (seq.known - 1) // self.block_size) if reads else []

    def _has_room(self, shared: list[int], total: int, growth: int, *, alone: bool) -> bool:
        claim = total - len(shared) + self.pool.num_idle(shared)
        if claim > self.pool.num_available:
            return False
        return alone or self.pool.num_used + claim + self.growth + growth <= self.pool.num_blocks * self.guard.share

    def _predicted_growth(self, seq: SequenceState, held: int) -> int:
        final = self.guard.history.predict(seq.output_len, seq.limit)
        return max(0, self.blocks_for(seq.request.prompt_len + final - 1) - held)

    def _expect_full(self, seq: SequenceState, registered: int) -> None:
        """Note when the next block can be registered: never, if its hash can't be known."""
        hashable = seq.request.tokens is not None or registered < len(seq.hashes)
        seq.next_full = (registered + 1) * self.block_size if hashable else math.inf
