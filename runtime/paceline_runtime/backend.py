"""Chooses what runs the steps: a model on a device, or the clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline_core.knobs import Knobs
from paceline_core.uneven import UnevenDevice
from paceline_runtime.byte_tokenizer import ByteTokenizer
from paceline_runtime.clock_runner import DEFAULT_CLOCK_BLOCKS, DEFAULT_CLOCK_MODEL_LEN, ClockModel, ClockRunner
from paceline_runtime.engine import ModelBackend
from paceline_runtime.settings import EngineSettings, SettingsError
from paceline_runtime.text_stream import Tokenizer

if TYPE_CHECKING:
    from paceline_runtime.loader import LoadedModel
    from paceline_runtime.parallel_follower import Follower
    from paceline_runtime.parallel_place import Place

__all__ = ["load_backend", "load_follower", "load_tokenizer_for"]

# characters of one to four bytes, so that everything behind it must cope with tokens that end inside a character
CLOCK_TEXT = "Paceline keeps the beat: été, naïve, 速い, 🎼. "


def load_backend(settings: EngineSettings, knobs: Knobs) -> ModelBackend:
    """Load what `settings` ask for. Raises `SettingsError`, a `ModelError`, or `MemoryError`."""
    if settings.device == "clock":
        return _clock(settings, knobs)
    return _model(settings, knobs)


def load_follower(settings: EngineSettings, knobs: Knobs, rank: int) -> Follower:
    """Load the part of rank `rank` of a tensor-parallel group that this process has joined. See `load_backend`."""
    from paceline_runtime.parallel_place import Place

    return _load(settings, knobs, Place(rank, settings.tensor_parallel_size)).follower()


def _model(settings: EngineSettings, knobs: Knobs) -> ModelBackend:
    from paceline_runtime.parallel_place import ALONE
    from paceline_runtime.parallel_start import first_place

    if settings.tensor_parallel_size == 1:
        return _load(settings, knobs, ALONE)
    with first_place(settings, _torch_device(settings)) as place:
        return _load(settings, knobs, place)


def _load(settings: EngineSettings, knobs: Knobs, place: Place) -> LoadedModel:
    import torch  # seconds and 200 MB that neither the clock nor the API process needs

    from paceline_kernels.cpu import native
    from paceline_runtime.loader import load_model

    assert settings.model is not None, "checked with the flags"
    threads = max(1, settings.threads // place.size)
    torch.set_num_threads(threads)
    if _torch_device(settings) == "cpu" and native.is_built():
        native.start(threads=threads)
    model = load_model(
        settings.model,
        revision=settings.revision,
        dtype=settings.dtype,
        quantization=settings.quantization,
        device=_torch_device(settings),
        kernels=settings.kernels,
        max_model_len=settings.max_model_len,
        block_size=knobs.block_size,
        kv_memory_fraction=knobs.kv_memory_fraction,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        num_blocks=settings.num_blocks,
        max_num_seqs_limit=knobs.max_num_seqs_limit,
        max_num_batched_tokens=knobs.max_num_batched_tokens,
        load_format=settings.load_format,
        seed=settings.seed,
        place=place,
    )
    model.part.kv.touch(threads)
    if model.part.decoder.native:
        torch.set_num_threads(1)  # the native kernels have their own threads, beside which torch's would spin
    return model


def _torch_device(settings: EngineSettings) -> str:
    import torch

    return _device(settings.device, cuda=torch.cuda.is_available())


def _device(asked: str, *, cuda: bool) -> str:
    if asked == "cuda" and not cuda:
        raise SettingsError("--device cuda: torch sees no GPU here; use --device cpu, or a torch build for your GPU")
    return ("cuda" if cuda else "cpu") if asked == "auto" else asked


def _clock(settings: EngineSettings, knobs: Knobs) -> ClockModel:
    assert settings.step_model is not None, "checked with the flags"
    tokenizer = load_tokenizer_for(settings)
    return ClockModel(
        runner=ClockRunner(
            UnevenDevice.from_document(settings.step_model), tokenizer.encode(CLOCK_TEXT, add_special_tokens=False)
        ),
        pool_blocks=settings.num_blocks or DEFAULT_CLOCK_BLOCKS,
        max_model_len=settings.max_model_len or DEFAULT_CLOCK_MODEL_LEN,
        vocab_size=tokenizer.vocab_size,
        eos_token_ids=tuple(tokenizer.eos_token_ids),
        kv_memory_fraction=knobs.kv_memory_fraction,
    )


def load_tokenizer_for(settings: EngineSettings) -> Tokenizer:
    """Return the model's tokenizer; the clock without a model has bytes for tokens. Raises a `ModelError`."""
    if settings.model is None:
        return ByteTokenizer()
    from paceline_runtime.tokenizer import load_tokenizer

    return load_tokenizer(settings.model, settings.revision)
