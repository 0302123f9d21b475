"""How the processes of a tensor-parallel group find each other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from paceline_runtime.parallel_link import FollowerLink
from paceline_runtime.parallel_place import Place
from paceline_runtime.settings import EngineSettings, SettingsError

__all__ = ["first_place", "join_group"]

# The slowest thing that one rank waits for another with is reading its part of the weights.
_PATIENCE = timedelta(minutes=30)


@contextmanager
def first_place(settings: EngineSettings, device_type: str) -> Iterator[Place]:
    """Start the other ranks, and be the first of them; they end again if what follows fails. Raises `RankDied`.

    NCCL (RCCL on ROCm) exchanges between GPUs, Gloo between processes on a CPU.
    """
    size = settings.tensor_parallel_size
    if device_type == "cuda" and torch.cuda.device_count() < size:
        raise SettingsError(
            f"--tensor-parallel-size {size} needs as many GPUs, and there are {torch.cuda.device_count()}: "
            "ask for more in the pod's resources, or lower it"
        )
    backend = "nccl" if device_type == "cuda" else "gloo"
    link = FollowerLink(settings, size, backend)
    try:
        join_group(0, size, backend, str(link.store))
        if backend == "nccl":
            link.watch(lambda: os._exit(1))  # this process may be in an exchange that will never end
        yield Place(0, size, link)
    except BaseException:
        link.close()
        raise


def join_group(rank: int, size: int, backend: str, store: str) -> None:
    """Join the ranks of one machine that know the file `store`; rank r takes GPU r."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are in one pod: no need for its name to resolve
    device = None
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    store_file = dist.FileStore(store, size)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store_file, rank=rank, world_size=size, timeout=_PATIENCE, device_id=device)
