"""The pool of KV blocks: who holds which, which are free, and which keep a reusable prefix.

A block is in exactly one of three places:

```
            allocate                     release, no hash
   free ───────────────▶ used (ref ≥ 1) ─────────────────▶ free
    ▲                      ▲        │ release, hashed
    │ evict (oldest first) │ share  ▼
    └────────────────────  cached (ref 0, findable by hash)
```

Free and cached blocks hang in two intrusive doubly linked lists that share their links, so every move costs O(1) and
allocates nothing.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence

__all__ = ["BlockPool", "hash_block", "prompt_hashes"]

ROOT = 0  # the parent of a sequence's first block
_DIGEST_BYTES = 16  # a collision would hand one tenant another's KV: 128 bits put that out of reach, also on purpose


def hash_block(parent: int, tokens: Sequence[int], salt: int) -> int:
    """Return the chained hash of one full block: equal only for equal tokens, equal predecessors and an equal salt."""
    digest = hashlib.blake2b(parent.to_bytes(_DIGEST_BYTES, "little"), digest_size=_DIGEST_BYTES)
    digest.update(salt.to_bytes(16, "little", signed=True))
    digest.update(array("q", tokens).tobytes())
    return int.from_bytes(digest.digest(), "little")


def prompt_hashes(tokens: Sequence[int], block_size: int, salt: int = 0) -> tuple[int, ...]:
    """Return the chained hashes of all full blocks of `tokens`, as `Request.prefix_hashes` takes them."""
    hashes: list[int] = []
    for end in range(block_size, len(tokens) + 1, block_size):
        hashes.append(hash_block(hashes[-1] if hashes else ROOT, tokens[end - block_size : end], salt))
    return tuple(hashes)


class BlockPool:
    """`num_blocks` KV blocks with reference counts and a prefix cache."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 1, "a pool has at least one block"
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.num_cached = 0
        self._refs = [0] * num_blocks
        self._hashes: list[int | None] = [None] * num_blocks
        self._by_hash: dict[int, int] = {}
        # links of both lists; the last two entries are their heads. All blocks start in the free list, in order.
        self._free, self._cached = num_blocks, num_blocks + 1
        self._next: list[int] = [*range(1, num_blocks + 1), 0, self._cached]
        self._prev: list[int] = [num_blocks, *range(num_blocks - 1), num_blocks - 1, self._cached]

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can give: the free ones and, by eviction, the cached ones."""
        return self.num_free + self.num_cached

    @property
    def num_used(self) -> int:
        """Blocks that at least one block table names."""
        return self.num_blocks - self.num_free - self.num_cached

    def allocate(self) -> int:
        """Take one block, evicting the oldest cached one if none is free. The caller checked `num_available`."""
        assert self.num_available > 0, "allocate from an empty pool"
        if self.num_free:
            block = self._next[self._free]
            self.num_free -= 1
        else:
            block = self._next[self._cached]
            self.num_cached -= 1
            self._forget(block)
        self._unlink(block)
        self._refs[block] = 1
        return block

    def take(self, count: int) -> list[int]:
        """Take several blocks, in the order in which `allocate` would give them."""
        if count > self.num_free:
            return [self.allocate() for _ in range(count)]
        following, refs, taken = self._next, self._refs, []
        block = following[self._free]
        for _ in range(count):
            refs[block] = 1
            taken.append(block)
            block = following[block]
        following[self._free], self._prev[block] = block, self._free
        self.num_free -= count
        return taken

    def find(self, hashes: Sequence[int], limit: int) -> list[int]:
        """Return the blocks of the longest cached prefix of `hashes`, at most `limit`, without taking them."""
        found: list[int] = []
        for value in hashes[:limit]:
            block = self._by_hash.get(value)
            if block is None:
                break
            found.append(block)
        return found

    def num_idle(self, blocks: Iterable[int]) -> int:
        """Count the `blocks` that nobody holds: sharing them takes them out of `num_available`."""
        return sum(not self._refs[block] for block in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        """Add one holder to each of the `blocks` (found by `find`)."""
        for block in blocks:
            if self._refs[block] == 0:
                self._unlink(block)
                self.num_cached -= 1
            self._refs[block] += 1

    def register(self, block: int, value: int) -> None:
        """Make a held, fully computed block findable by its hash. An equal block that came first keeps the place."""
        assert self._refs[block] > 0, f"block {block} is registered but nobody holds it"
        if self._hashes[block] is None and value not in self._by_hash:
            self._hashes[block] = value
            self._by_hash[value] = block

    def release(self, table: Sequence[int]) -> None:
        """Drop one holder of each block of a table, tail first, so that the tails of prefixes are evicted first."""
        held, hashes = self._refs, self._hashes
        for block in reversed(table):
            refs = held[block] - 1
            assert refs >= 0, f"block {block} is freed twice"
            held[block] = refs
            if refs == 0:
                if hashes[block] is None:
                    self._append(self._free, block)
                    self.num_free += 1
                else:
                    self._append(self._cached, block)
                    self.num_cached += 1

    def forget_all(self) -> None:
        """Empty the prefix cache. Held blocks stay held but are no longer found."""
        while self.num_cached:
            block = self._next[self._cached]
            self._unlink(block)
            self.num_cached -= 1
            self._append(self._free, block)
            self.num_free += 1
        self._by_hash.clear()
        self._hashes = [None] * self.num_blocks

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert conservation: `free + used + cached = total` and reference counts that match the `tables`. O(blocks)."""
        held = Counter(block for table in tables for block in table)
        free, cached = self._walk(self._free), self._walk(self._cached)
        assert (len(free), len(cached)) == (self.num_free, self.num_cached), "the lists and their counts differ"
        assert free.isdisjoint(cached), "a block is both free and cached"
        assert self.num_free + self.num_used + self.num_cached == self.num_blocks, "blocks were lost"
        for block in range(self.num_blocks):
            assert self._refs[block] == held[block], f"block {block}: {self._refs[block]} refs, {held[block]} tables"
            assert (self._refs[block] == 0) == (block in free or block in cached), f"block {block} is in no place"
        assert all(self._hashes[block] == value for value, block in self._by_hash.items()), "the hash map is stale"
        assert all(self._hashes[block] is None for block in free), "a free block has a hash"
        assert all(self._hashes[block] is not None for block in cached), "a cached block can't be found"

    def _forget(self, block: int) -> None:
        value = self._hashes[block]
        assert value is not None, "a cached block has a hash"
        del self._by_hash[value]
        self._hashes[block] = None

    def _append(self, head: int, block: int) -> None:
        last = self._prev[head]
        self._next[last] = self._prev[head] = block
        self._prev[block], self._next[block] = last, head

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before], self._prev[after] = after, before

    def _walk(self, head: int) -> set[int]:
        seen: set[int] = set()
        block = self._next[head]
        while block != head:
            assert block not in seen, "a list has a loop"
            seen.add(block)
            block = self._next[block]
        return seen
