"""The executor over a stand-in for a GPU: which steps take graphs, when graphs are recorded, what memory is measured."""

from collections.abc import Sequence

import model_harness as harness
import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from paceline_runtime.gpu_device import device_for
from paceline_runtime.gpu_executor import PagedExecutor
from paceline_runtime.gpu_layout import Span, lay_out
from paceline_runtime.gpu_memory import measure_gpu
from paceline_runtime.gpu_tables import SlotTables
from paceline_runtime.loader import load_model

CPU = torch.device("cpu")
MIB = 1 << 20


class Metered:
    """A CPU that reports a GPU's memory: what graphs take is gone once they are recorded, until they are forgotten."""

    where = CPU
    programs = 2

    def __init__(self, *, peaks: Sequence[int], graph: int) -> None:
        self._host = device_for(CPU)
        self._peaks, self._graph = list(peaks), graph
        self.recorded = 0
        self.peaks: list[torch.Size] = []

    def pinned(self, count, dtype):
        return self._host.pinned(count, dtype)

    def mark(self):
        return self._host.mark()

    def record(self, compute):
        self.recorded += 1
        return Recorded(compute)

    def forget_graphs(self):
        self.recorded = 0

    def free_memory(self):
        return 900 * MIB - self.recorded * self._graph, 1000 * MIB

    def peak(self, compute):
        self.peaks.append(compute().shape)
        return self._peaks[len(self.peaks) - 1]


class Recorded:
    """A graph that wasn't computed yet: recording all sizes under the interpreter would take minutes."""

    def __init__(self, compute):
        self._compute = compute
        self.output = torch.empty(0)

    def replay(self):
        self.output = self._compute()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    shape = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    tiny = harness.tiny_llama(seed=6, num_key_value_heads=1, vocab_size=61, **shape)
    uri = harness.save_folder(tiny, tmp_path_factory.mktemp("executor"))
    model = load_model(uri, max_model_len=512, num_blocks=40, max_num_seqs_limit=4, kernels="triton")
    yield model
    model.runner.close()


def executor_on(device, model, max_len=512):
    return PagedExecutor(model.part.decoder, model.part.kv, device, max_seqs=4, max_len=max_len)


def test_the_budget_is_what_the_largest_step_and_the_graphs_leave(model):
    device = Metered(peaks=(50 * MIB, 35 * MIB), graph=2 * MIB)
    executor = executor_on(device, model)
    budget = measure_gpu(
        executor, device, weights=60 * MIB, max_tokens=20, max_len=16, block_bytes=MIB, max_blocks=10_000
    )  # fmt: skip
    assert device.peaks == [torch.Size([4, 61])] * 2, "logits of as many sequences as there may be"
    assert (budget.step_tokens, budget.token_bytes) == (20, 1.5 * MIB), "by a step of half as many tokens"
    graphs = len(executor.graphs.recorded) or 3  # 1, 2, 4
    assert graphs == 3
    assert budget.limit == 1000 * MIB
    assert budget.base == (100 - 60) * MIB, "what is taken and isn't weights"
    assert budget.activations == (50 + 3 * 2) * MIB
    assert budget.free == 1000 * MIB - 40 * MIB - 60 * MIB - 56 * MIB
    assert budget.blocks_for(0.5) == budget.free // 2 // MIB
    assert device.recorded == 0, "graphs of a pool that will go away are given back"
    assert "--tensor-parallel-size" in budget.remedy


def test_graphs_are_recorded_again_for_a_new_pool_if_they_were_recorded_ahead(model):
    device = Metered(peaks=(), graph=0)
    executor = executor_on(device, model)
    executor.resize(40)
    assert device.recorded == 0
    executor.record_graphs()
    assert executor.graphs.recorded == (4, 2, 1)
    executor.resize(40)
    assert device.recorded == 3


def stage(executor, tables, spans, rows, *, decodes):
    return executor.stage(lay_out(spans, tables, executor.shape), rows, {}, decodes=decodes)


def test_only_steps_of_decodes_that_fit_take_a_graph(model):
    executor = executor_on(device_for(CPU), model)
    tables = SlotTables(4, executor.table_width)
    two = [Span(n, 3, [5], [n]) for n in range(2)]
    assert stage(executor, tables, two, [0, 1], decodes=True).size == 2
    assert stage(executor, tables, two, [0, 1], decodes=False).size is None
    assert stage(executor, tables, [Span(n, 3, [5], [n]) for n in range(3)], [0, 1, 2], decodes=True).size == 4


def test_a_long_new_table_takes_a_plain_launch(model):
    executor = executor_on(device_for(CPU), model, max_len=40_000)
    tables = SlotTables(4, executor.table_width)
    start = 16 * 2400 - 1  # a prompt that was cached whole: 2400 blocks are new to the table at once
    staged = stage(executor, tables, [Span(1, start, [5], list(range(2400)))], [0], decodes=True)
    assert staged.size is None
    assert [name for name, *_ in staged.packed.parts].count("rows") == 1
    again = stage(executor, tables, [Span(1, start, [5], list(range(2400)))], [0], decodes=True)
    assert again.size == 1, "the table is there now"


def test_a_row_has_the_same_logits_alone_and_padded(model):
    """The same two decodes as a plain launch, in a graph of two, and in a graph of four beside padding."""
    executor = executor_on(device_for(CPU), model)
    executor.resize(40)
    tables = SlotTables(4, executor.table_width)
    prompts = [Span(1, 0, [3, 4, 5], [7]), Span(2, 0, [9, 8], [2])]
    executor.run(stage(executor, tables, prompts, [2, 4], decodes=False))
    decodes = [Span(1, 3, [6], [7]), Span(2, 2, [1], [2])]
    plain = executor.run(stage(executor, tables, decodes, [0, 1], decodes=False)).logits.clone()
    graph = executor.run(stage(executor, tables, decodes, [0, 1], decodes=True)).logits.clone()
    third = Span(3, 0, [1], [11])
    padded = executor.run(stage(executor, tables, [*decodes, third], [0, 1, 2], decodes=True))
    assert padded.logits.shape == (3, 61)
    torch.testing.assert_close(graph, plain, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(padded.logits[:2], plain, rtol=1e-5, atol=1e-5)
    assert np.isfinite(padded.logits.numpy()).all()
