"""Which implementation of an op runs, and sampling and masks through the ops on both sides."""

import threading

import pytest
import torch

from paceline_kernels import Op, RowSampling, kernels_in_use, sample, sampling_columns, use_kernels
from paceline_kernels.logit_edits import mask_tokens


def named():
    op = Op(lambda x: "reference")
    op.register("cpu")(lambda x: "cpu")
    op.register("cuda")(lambda x: "triton")
    return op


def test_the_device_decides_unless_kernels_are_chosen():
    op, x = named(), torch.zeros(1)
    assert op(x) == "cpu"
    assert op.on("cuda")(x) == "triton"
    with use_kernels("triton"):
        assert op(x) == "triton"
        with use_kernels("torch"):
            assert op(x) == "cpu"
            assert op.on("cuda")(x) == "reference", "a CPU's version may use what a GPU doesn't have"
        assert kernels_in_use("cpu") == "triton"
    assert [kernels_in_use(device) for device in ("cpu", "cuda")] == ["torch", "triton"]


def test_the_choice_holds_for_its_thread_and_ends_with_an_error():
    seen = []

    def fail():
        with use_kernels("triton"):
            thread = threading.Thread(target=lambda: seen.append(kernels_in_use("cpu")))
            thread.start()
            thread.join()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert seen == ["torch"]
    assert kernels_in_use("cpu") == "torch"
    with pytest.raises(AssertionError, match="one of auto, triton, native, torch"), use_kernels("cutlass"):
        pass


def test_an_op_without_a_version_is_its_reference():
    with use_kernels("triton"):
        assert Op(lambda x: "reference")(torch.zeros(1)) == "reference"


def test_columns_are_left_out_where_no_row_needs_them():
    greedy = sampling_columns([RowSampling(0.0), RowSampling(0.0)])
    assert greedy.seeds is None and greedy.top_ks is None
    mixed = sampling_columns([RowSampling(0.0), RowSampling(0.5, top_k=3, uniform=0.25)])
    assert mixed.temperatures.tolist() == [0.0, 0.5]
    assert mixed.top_ks.tolist() == [0, 3]
    assert mixed.top_ps is None and mixed.min_ps is None
    assert mixed.seeds.tolist() == [0, 2**51]


def test_sampling_and_masks_go_to_triton():
    pytest.importorskip("triton")
    logits = torch.randn(3, 70, generator=torch.Generator().manual_seed(1))
    rows = [RowSampling(0.0), RowSampling(1.0, top_k=1, uniform=0.3), RowSampling(0.8, top_p=1e-6, uniform=0.9)]
    with use_kernels("triton"):
        assert sample(logits, rows).tolist() == logits.argmax(-1).tolist(), "nothing else is left to choose"
    words = torch.randint(-(2**31), 2**31, (2, 2), generator=torch.Generator().manual_seed(2)).to(torch.int32)
    where, both = torch.tensor([2, 0]), []
    for choice in ("torch", "triton"):
        masked = logits.clone()
        with use_kernels(choice):
            mask_tokens(masked, where, words)
        both.append(masked)
    assert torch.equal(*both)
