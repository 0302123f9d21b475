"""Downloads of `hf://` models: only the files that are needed, at one pinned commit, resumed, and checked. No torch here.

`huggingface_hub` talks to the server and keeps the cache (its layout, so that other programs share it); here is decided what
is fetched, how often it is tried again, that every file has the checksum that the server states, and what went wrong.
"""

from __future__ import annotations

import hashlib
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from huggingface_hub import HfApi, constants, get_session, hf_hub_url
from huggingface_hub.file_download import http_get
from huggingface_hub.hf_api import RepoSibling
from huggingface_hub.utils._fixes import WeakFileLock
from huggingface_hub.utils._headers import build_hf_headers
from tqdm import tqdm

from paceline_runtime.hub_errors import LIBRARY_ERRORS, fetch_error, is_transient
from paceline_runtime.hub_files import INDEX, describing_files, weight_files
from paceline_runtime.hub_progress import progress_for
from paceline_runtime.hub_settings import HubSettings
from paceline_runtime.logs import log_event
from paceline_runtime.model_errors import ModelFetchError, ModelNotFound
from paceline_runtime.model_json import read_json, shard_names

__all__ = ["fetch_model"]

T = TypeVar("T")
# A cut connection is resumed by the library at once, five times; these pauses (s) outlast a server's restart.
_PAUSES = (1.0, 4.0, 15.0)
_WORKERS = 4
_CHUNK = 1 << 20


def fetch_model(
    repository: str,
    revision: str | None,
    file: str | None,
    settings: HubSettings,
    sleep: Callable[[float], None] = time.sleep,
) -> Path:
    """Return the local folder of a repository (or the local path of one GGUF `file` of it), downloading what is missing.

    `revision` is a branch, tag or commit. Raises `UriError` for a host that isn't allowed, `ModelNotFound` or
    `ModelFetchError` in one line.
    """
    where, revision = f"hf://{repository}", revision or "main"
    settings.check_host(settings.endpoint)
    if settings.offline:
        cached = _cached(repository, revision, file, settings)
        if cached is None:
            raise ModelNotFound(f"{where} at {revision!r} isn't in the cache {settings.cache}, and HF_HUB_OFFLINE is set")
        return cached
    download = _Download(repository, revision, file, settings, sleep)
    try:
        return download.run()
    except LIBRARY_ERRORS as error:
        failed = fetch_error(error, where, revision, settings)
        cached = _cached(repository, revision, file, settings) if is_transient(error) else None
        if cached is None:
            raise failed from error
        log_event("model server unreachable, using the cache", model=where, reason=str(failed))
        return cached


class _Download:
    """One download. All files come from the commit that the revision meant at the beginning."""

    def __init__(
        self, repository: str, revision: str, file: str | None, settings: HubSettings, sleep: Callable[[float], None]
    ) -> None:
        self._where = f"hf://{repository}"
        self._repository = repository
        self._revision = revision
        self._file = file
        self._settings = settings
        self._sleep = sleep
        self._api = HfApi(endpoint=settings.endpoint, token=settings.token or False)

    def run(self) -> Path:
        with _guarded(self._settings):
            info = self._patiently(
                lambda: self._api.model_info(self._repository, revision=self._revision, files_metadata=True)
            )
            commit, files = str(info.sha), {item.rfilename: item for item in info.siblings or ()}
            self._fetch_all(commit, files)
        self._remember(commit)
        return _local(self._settings, self._repository, commit, self._file)

    def _fetch_all(self, commit: str, files: Mapping[str, RepoSibling]) -> None:
        if self._file is not None:
            if self._file not in files:
                raise ModelNotFound(f"{self._where} holds no file {self._file!r}")
            self._fetch(commit, [files[self._file]])
            return
        names = describing_files(files)
        self._fetch(commit, [files[name] for name in (*names, *[n for n in (INDEX,) if n in files])])
        self._fetch(commit, [files[name] for name in weight_files(files, self._indexed(commit, files), self._where)])

    def _indexed(self, commit: str, files: Mapping[str, RepoSibling]) -> list[str] | None:
        if INDEX not in files:
            return None
        return shard_names(read_json(_local(self._settings, self._repository, commit, INDEX)))

    def _fetch(self, commit: str, files: list[RepoSibling]) -> None:
        """Download and check what isn't here yet."""
        missing = [file for file in files if not self._is_here(commit, file)]
        if not missing:
            return
        total = sum(file.size or 0 for file in missing if not self._blob(file).exists())
        self._check_space(total)
        with progress_for(self._where, total) as progress, ThreadPoolExecutor(_WORKERS) as pool:
            for done in [pool.submit(self._fetch_one, commit, file, progress.advance) for file in missing]:
                done.result()

    def _fetch_one(self, commit: str, file: RepoSibling, advance: Callable[[int], None]) -> None:
        mark = self._verified(file)
        mark.parent.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(mark.with_suffix(".lock")):  # API and engine process start at once
            if self._is_here(commit, file):
                return
            for _ in range(2):
                if self._attempt(commit, file, advance):
                    mark.touch()
                    return
                log_event("checksum differs", model=self._where, file=file.rfilename)
        raise ModelFetchError(f"{self._where}: {file.rfilename} doesn't have the checksum that the server states")

    def _attempt(self, commit: str, file: RepoSibling, advance: Callable[[int], None]) -> bool:
        """Download one file; tell whether its checksum is right. A wrong one isn't kept."""
        if file.lfs:
            if not self._blob(file).exists():
                part = self._part(file)
                self._patiently(lambda: self._resume(commit, file, part, advance))
                if not _intact(part, file):
                    part.unlink()
                    return False
                part.replace(self._blob(file))
            advance = _nowhere
        path = self._patiently(lambda: self._get(commit, file.rfilename, advance))
        if not _intact(path, file):
            path.resolve().unlink()
            path.unlink()
            return False
        return True

    def _resume(self, commit: str, file: RepoSibling, part: Path, advance: Callable[[int], None]) -> None:
        """Append what is missing to the part that is here: of gigabytes nothing is fetched twice, also after a restart."""
        assert file.size is not None, "the server states the size of large files"
        have = part.stat().st_size if part.exists() else 0
        if have > file.size:
            part.unlink()
            have = 0
        url = hf_hub_url(self._repository, file.rfilename, revision=commit, endpoint=self._settings.endpoint)
        headers = build_hf_headers(token=self._settings.token or False)
        with part.open("ab") as stream:
            http_get(url, stream, resume_size=have, headers=headers, expected_size=file.size, tqdm_class=_counter(advance))

    def _part(self, file: RepoSibling) -> Path:
        """Return where a large file grows."""
        blob = self._blob(file)
        blob.parent.mkdir(parents=True, exist_ok=True)
        return blob.with_suffix(".part")

    def _blob(self, file: RepoSibling) -> Path:
        """Return the library's own place for the content of a file."""
        return _repository_folder(self._settings, self._repository) / "blobs" / _content(file)

    def _is_here(self, commit: str, file: RepoSibling) -> bool:
        """Tell whether a file was checked and stands under this commit: its content may have come with another one."""
        path = _local(self._settings, self._repository, commit, file.rfilename)
        return self._verified(file).exists() and path.exists()

    def _get(self, commit: str, name: str, advance: Callable[[int], None]) -> Path:
        """Download a small file, or link a large one that is here."""
        cache, counter = self._settings.cache, _counter(advance)
        return Path(self._api.hf_hub_download(self._repository, name, revision=commit, cache_dir=cache, tqdm_class=counter))

    def _verified(self, file: RepoSibling) -> Path:
        """Return the mark that says that a file was checked: reading 16 GB again at every start would take a minute."""
        return _repository_folder(self._settings, self._repository) / ".paceline-verified" / _content(file)

    def _remember(self, commit: str) -> None:
        """Keep what the revision meant, for offline starts."""
        ref = _repository_folder(self._settings, self._repository) / "refs" / self._revision
        ref.parent.mkdir(parents=True, exist_ok=True)
        ref.write_text(commit)

    def _check_space(self, total: int) -> None:
        folder = self._settings.cache
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if total > free:
            raise ModelFetchError(f"{self._where} needs {total} bytes in {folder}, where {free} are free")

    def _patiently(self, action: Callable[[], T]) -> T:
        """Try again after errors that pass."""
        for pause in _PAUSES:
            try:
                return action()
            except LIBRARY_ERRORS as error:
                if not is_transient(error):
                    raise
                reason = str(fetch_error(error, self._where, self._revision, self._settings))
                log_event("download interrupted, trying again", model=self._where, reason=reason, after=pause)
            self._sleep(pause)
        return action()


def _counter(advance: Callable[[int], None]) -> Any:
    """Return a class like tqdm's that shows nothing and passes on what it counts."""

    class Counter(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **(options | {"disable": True}))
            advance(int(options.get("initial") or 0))

        def update(self, n: float | None = 1) -> bool | None:
            advance(int(n or 0))
            return None

    return Counter


def _nowhere(_num_bytes: int) -> None:
    """Count nothing."""


_guard_lock = threading.Lock()


@contextmanager
def _guarded(settings: HubSettings) -> Iterator[None]:
    """Check the host of every request, redirected ones too: an allowed server could send us anywhere."""
    if settings.hosts is None:
        yield
        return

    def check(request: Any) -> None:
        settings.check_host(str(request.url))

    with _guard_lock:
        session, xet = get_session(), constants.HF_HUB_DISABLE_XET
        before = session.event_hooks
        session.event_hooks = {**before, "request": [*before["request"], check]}
        constants.HF_HUB_DISABLE_XET = True  # its own client asks nobody
        try:
            yield
        finally:
            session.event_hooks, constants.HF_HUB_DISABLE_XET = before, xet


def _cached(repository: str, revision: str, file: str | None, settings: HubSettings) -> Path | None:
    """Return the folder or file that is here from an earlier download, if it was whole."""
    ref = _repository_folder(settings, repository) / "refs" / revision
    commit = (ref.read_text().strip() if ref.is_file() else "") or revision  # empty: a power cut while it was written
    path = _local(settings, repository, commit, file)
    return path if path.exists() else None


def _local(settings: HubSettings, repository: str, commit: str, file: str | None) -> Path:
    folder = _repository_folder(settings, repository) / "snapshots" / commit
    return folder if file is None else folder / PurePosixPath(file)


def _repository_folder(settings: HubSettings, repository: str) -> Path:
    return settings.cache / ("models--" + repository.replace("/", "--"))


def _content(file: RepoSibling) -> str:
    """Return what names the content of a file: SHA-256 of a large one, git's sum of a small one."""
    return file.lfs.sha256 if file.lfs else str(file.blob_id)


def _intact(path: Path, file: RepoSibling) -> bool:
    """Tell whether a file has the server's checksum."""
    size = path.stat().st_size
    if file.size is not None and size != file.size:
        return False
    # git's SHA-1 names content here, it guards nothing
    digest = hashlib.sha256() if file.lfs else hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest() == _content(file)
