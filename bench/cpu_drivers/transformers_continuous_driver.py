"""transformers' continuous batching manager: MODEL SLOTS DTYPE."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from driver import Jobs, serve

PAGE, PAGES = 256, 96  # tokens, pages: 32 sequences of W need 64 pages at most, the long prompt 9
BATCH_TOKENS = 512  # of a step: attention is computed over the whole step's tokens at once, so more cost more than they save
PATIENCE = 300  # seconds: a result is a whole answer


class Manager:
    def __init__(self, model: str, slots: int, dtype: str) -> None:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        ).eval()
        sampling = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=256)
        settings = transformers.ContinuousBatchingConfig(
            page_size=PAGE, num_blocks=PAGES, max_batch_tokens=BATCH_TOKENS, max_requests_per_batch=slots,
            allow_block_sharing=False,
        )  # fmt: skip
        self._manager = loaded.init_continuous_batching(sampling, settings)
        self._manager.start()

    def run(self, jobs: Jobs, clock: Callable[[], float]) -> list[dict[str, Any]]:
        origin = time.perf_counter() - clock()
        names = [self._add(job) for job in jobs]
        done: dict[str, dict[str, Any]] = {}
        while len(done) < len(jobs):
            result = self._manager.get_result(timeout=PATIENCE)
            if result is None:
                died = self._manager.background_thread_status.fatal_error
                raise RuntimeError(f"it died: {died}" if died else f"no result in {PATIENCE} s")
            if result.error:
                raise RuntimeError(f"a request failed: {result.error}")
            if result.is_finished():
                times = [moment - origin for moment in result.timestamps]
                done[result.request_id] = {"tokens": result.generated_tokens, "first": times[0], "last": times[-1]}
        return [done[name] for name in names]

    def _add(self, job: dict[str, Any]) -> str:
        return str(self._manager.add_request(job["prompt"], max_new_tokens=job["output"], record_timestamps=True))


if __name__ == "__main__":
    serve(f"transformers {transformers.__version__}", Manager(sys.argv[1], int(sys.argv[2]), sys.argv[3]).run)
