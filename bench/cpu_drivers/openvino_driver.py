"""OpenVINO GenAI's continuous batching pipeline, driven step by step: MODEL SLOTS PRODUCTS."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from driver import Jobs, serve

CACHE_GB = 2


class Pipeline:
    """`products`: the type that they are computed in (`f32`, `bf16`); empty: the plugin's choice for this processor."""

    def __init__(self, model: Path, slots: int, products: str) -> None:
        config = genai.SchedulerConfig()
        config.max_num_seqs = slots
        config.max_num_batched_tokens = 4096  # a whole prompt: without split-fuse a longer one would never start
        config.dynamic_split_fuse = False  # with it the cap on sequences isn't obeyed
        config.cache_size = CACHE_GB
        config.enable_prefix_caching = False
        properties = {"INFERENCE_PRECISION_HINT": products} if products else {}
        self._pipeline = genai.ContinuousBatchingPipeline(model, config, "CPU", properties)
        self._next = 0

    def run(self, jobs: Jobs, clock: Callable[[], float]) -> list[dict[str, Any]]:
        handles = [self._add(job) for job in jobs]
        tokens: list[list[int]] = [[] for _ in jobs]
        times: list[list[float]] = [[] for _ in jobs]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            now = clock()
            for i, handle in enumerate(handles):
                while handle.can_read():
                    for output in handle.read().values():
                        tokens[i] += output.generated_ids
                        times[i].append(now)
        return [{"tokens": list(t), "first": seen[0], "last": seen[-1]} for t, seen in zip(tokens, times, strict=True)]

    def _add(self, job: dict[str, Any]) -> Any:
        config = genai.GenerationConfig()
        config.max_new_tokens = job["output"]
        config.ignore_eos = True
        config.do_sample = False
        self._next += 1
        ids = ov.Tensor(np.asarray([job["prompt"]], dtype=np.int64))
        return self._pipeline.add_request(self._next, ids, config)


if __name__ == "__main__":
    serve(f"openvino-genai {genai.__version__}", Pipeline(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]).run)
