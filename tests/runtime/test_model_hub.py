"""`hf://` downloads against a hub on loopback: what is fetched, resumed, checked, cached, refused, and said."""

import contextlib
import json
import logging
import os
import socket
import time

import click
import pytest
from click.testing import CliRunner
from hub_server import Hub
from huggingface_hub import constants
from hypothesis import given
from hypothesis import strategies as st

from paceline_runtime import hub as hub_module
from paceline_runtime.hub_files import describing_files, weight_files
from paceline_runtime.hub_progress import LogProgress
from paceline_runtime.hub_settings import ALLOWED_HOSTS_ENV, HubSettings
from paceline_runtime.model_errors import ModelFetchError, ModelFormatError, ModelNotFound, UriError
from paceline_runtime.model_flags import model_source_options
from paceline_runtime.uri import ALLOWED_SCHEMES_ENV, resolve_model

TOKEN = "hf_aVerySecretToken"
WEIGHTS = bytes(range(256)) * 400
INDEX = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}).encode()
REPOSITORY = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "tokenizer.json": b"{}" * 50,
    "README.md": b"# hello",
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"pickle",
    "original/consolidated.safetensors": b"twice the same",
    "handler.py": b"print('no')",
}
SHARDED = {
    "config.json": b"{}",
    "model.safetensors.index.json": INDEX,
    "model-1.safetensors": WEIGHTS,
    "model-2.safetensors": WEIGHTS[::-1],
    "consolidated.safetensors": b"the same in one",
}


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    """An own cache, no settings of the machine, and no waiting."""
    for name in ("HF_ENDPOINT", "HF_TOKEN", "HF_HUB_OFFLINE", "HF_HOME", ALLOWED_HOSTS_ENV, ALLOWED_SCHEMES_ENV):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(time, "sleep", lambda _: None)  # the library waits a second before it resumes


@pytest.fixture
def serve(monkeypatch):
    """Start a hub with `serve(files, **options)` and make it the endpoint."""
    started = []

    def start(files=REPOSITORY, **options):
        hub = Hub(dict(files), **options).__enter__()
        started.append(hub)
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        return hub

    yield start
    for hub in started:
        hub.__exit__()


def fetch(monkeypatch, uri="hf://org/name", revision=None):
    """Resolve a URI; the pauses between tries are noted instead of waited for."""
    pauses = []
    original = hub_module.fetch_model
    monkeypatch.setattr(hub_module, "fetch_model", lambda *args: original(*args, sleep=pauses.append))
    try:
        return resolve_model(uri, revision), pauses
    finally:
        monkeypatch.setattr(hub_module, "fetch_model", original)


def test_only_what_is_needed_is_fetched(serve, monkeypatch):
    hub = serve()
    folder, _ = fetch(monkeypatch)
    assert hub.fetched() == {"config.json", "tokenizer.json", "model.safetensors"}
    assert folder.name == hub.commit
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS


def test_shards_are_those_of_the_index(serve, monkeypatch):
    hub = serve(SHARDED)
    folder, _ = fetch(monkeypatch)
    assert hub.fetched() == set(SHARDED) - {"consolidated.safetensors"}
    assert (folder / "model-2.safetensors").read_bytes() == WEIGHTS[::-1]


def test_one_gguf_file_is_enough_and_of_several_one_is_named(serve, monkeypatch):
    hub = serve({"config.json": b"{}", "a.Q4_0.gguf": b"GGUFa", "README.md": b""})
    folder, _ = fetch(monkeypatch)
    assert (folder / "a.Q4_0.gguf").read_bytes() == b"GGUFa"
    hub.files["b.gguf"] = b"GGUFb"
    hub.commit = "d" * 40
    with pytest.raises(ModelNotFound, match=r"2 GGUF files: name one, as in hf://org/name/a.Q4_0.gguf"):
        fetch(monkeypatch)
    path, _ = fetch(monkeypatch, "hf://org/name/b.gguf@v1")
    assert path.read_bytes() == b"GGUFb"
    with pytest.raises(ModelNotFound, match=r"no file 'c.gguf'"):
        fetch(monkeypatch, "hf://org/name/c.gguf")


def test_a_second_start_fetches_nothing(serve, monkeypatch):
    hub = serve()
    fetch(monkeypatch)
    hub.requests.clear()
    fetch(monkeypatch)
    assert hub.fetched() == set()
    assert len(hub.requests) == 1, "one question: which commit is it?"


def ranges(hub, name):
    return [range_ for method, path, range_ in hub.requests if method == "GET" and path.endswith(name)]


def test_what_a_new_commit_left_alone_is_not_fetched_again_and_is_there(serve, monkeypatch):
    hub = serve()
    fetch(monkeypatch)
    hub.commit, hub.files["config.json"] = "d" * 40, b'{"architectures": ["MistralForCausalLM"]}'
    folder, _ = fetch(monkeypatch)
    assert folder.name == hub.commit
    assert hub.fetched() == {"config.json"}
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        name: hub.files[name] for name in ("config.json", "tokenizer.json", "model.safetensors")
    }


def test_files_of_the_same_content_are_all_there(serve, monkeypatch):
    hub = serve({**SHARDED, "model-2.safetensors": WEIGHTS, "tokenizer.json": b"{}"})
    folder, _ = fetch(monkeypatch)
    assert {path.name for path in folder.iterdir()} == set(hub.files) - {"consolidated.safetensors"}


def test_what_another_program_has_removed_is_fetched_again(serve, monkeypatch):
    serve()
    folder, _ = fetch(monkeypatch)
    for name in ("model.safetensors", "config.json"):
        (folder / name).resolve().unlink()
    assert (fetch(monkeypatch)[0] / "model.safetensors").read_bytes() == WEIGHTS
    assert (folder / "config.json").read_bytes() == REPOSITORY["config.json"]


@pytest.fixture
def small_pieces(monkeypatch):
    """What was received in whole pieces (of 10 MB) is kept when a connection is cut."""
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1024)


def test_a_cut_connection_is_resumed(serve, monkeypatch, small_pieces):
    hub = serve()
    hub.cuts["model.safetensors"] = 2
    folder, pauses = fetch(monkeypatch)
    half = len(WEIGHTS) // 2
    assert ranges(hub, "model.safetensors") == [None, f"bytes={half}-", f"bytes={half + half // 2}-"]
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert pauses == []


def test_a_download_goes_on_where_an_earlier_start_failed(serve, monkeypatch, small_pieces):
    hub = serve()
    hub.cuts["model.safetensors"] = 1
    hub.statuses.append(("bytes=", 403))
    with pytest.raises(ModelFetchError):
        fetch(monkeypatch)
    hub.requests.clear()
    folder, _ = fetch(monkeypatch)
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert ranges(hub, "model.safetensors") == [f"bytes={len(WEIGHTS) // 2}-"]
    assert "config.json" not in hub.fetched(), "what was whole is kept"


def test_a_busy_server_is_asked_again_after_pauses(serve, monkeypatch):
    hub = serve()
    hub.statuses.extend([("/api/models", 503), ("/api/models", 503)])
    _, pauses = fetch(monkeypatch)
    assert pauses[:2] == [1.0, 4.0]


def test_a_server_that_stays_busy_is_an_error(serve, monkeypatch):
    hub = serve()
    hub.statuses.extend([("/api/models", 503)] * 50)
    with pytest.raises(ModelFetchError, match=r"can't be fetched: 127.0.0.1:\d+ answers 503$"):
        fetch(monkeypatch)


def test_a_wrong_checksum_is_fetched_again(serve, monkeypatch):
    hub = serve()
    hub.corrupt["model.safetensors"] = 1
    folder, _ = fetch(monkeypatch)
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_checksum_that_stays_wrong_is_an_error_and_leaves_nothing(serve, monkeypatch, name):
    hub = serve()
    hub.corrupt[name] = 9
    with pytest.raises(ModelFetchError, match=f"{name} doesn't have the checksum"):
        fetch(monkeypatch)
    hub.corrupt.clear()
    folder, _ = fetch(monkeypatch)
    assert (folder / name).read_bytes() == REPOSITORY[name]


def test_a_revision_is_pinned_to_its_commit(serve, monkeypatch):
    hub = serve()
    folder, _ = fetch(monkeypatch, "hf://org/name@v1")
    assert folder.name == hub.commit
    assert fetch(monkeypatch, revision=hub.commit)[0] == folder
    with pytest.raises(ModelFetchError, match="has no revision 'v2'"):
        fetch(monkeypatch, revision="v2")


def test_the_token_opens_a_private_repository_and_is_never_shown(serve, monkeypatch, caplog):
    serve(token=TOKEN)
    with pytest.raises(ModelFetchError, match="knows no such repository, or it is private and HF_TOKEN isn't set"):
        fetch(monkeypatch)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(ModelFetchError, match=r"refuses HF_TOKEN for hf://org/name \(401\)") as error:
        fetch(monkeypatch)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with caplog.at_level(logging.DEBUG):
        fetch(monkeypatch)
    assert TOKEN not in caplog.text and "hf_wrong" not in str(error.value)
    assert TOKEN not in repr(HubSettings.from_environment({"HF_TOKEN": TOKEN}))


@pytest.mark.parametrize(("token", "advice"), [(None, "and set HF_TOKEN"), (TOKEN, "with the account of HF_TOKEN")])
def test_a_gated_repository_says_where_its_licence_is(serve, monkeypatch, token, advice):
    hub = serve(gated=True)
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(ModelFetchError, match=f"is gated: accept its licence at {hub.endpoint}/org/name {advice}") as error:
        fetch(monkeypatch)
    assert "\n" not in str(error.value)


def test_an_unknown_repository(serve, monkeypatch):
    serve()
    with pytest.raises(ModelFetchError, match="knows no such repository"):
        fetch(monkeypatch, "hf://org/other")


def unreachable_endpoint():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_an_unreachable_server(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", unreachable_endpoint())
    with pytest.raises(ModelFetchError, match=r"can't be fetched from 127.0.0.1:\d+: .*") as error:
        fetch(monkeypatch)
    assert "\n" not in str(error.value)


def test_a_restart_without_network_uses_the_cache(serve, monkeypatch):
    serve()
    folder, _ = fetch(monkeypatch, "hf://org/name@v1")
    monkeypatch.setenv("HF_ENDPOINT", unreachable_endpoint())
    assert fetch(monkeypatch, "hf://org/name@v1")[0] == folder


def test_offline_asks_nobody(serve, monkeypatch):
    hub = serve()
    folder, _ = fetch(monkeypatch)
    hub.requests.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fetch(monkeypatch)[0] == folder
    with pytest.raises(ModelNotFound, match=r"at 'main' isn't in the cache .*, and HF_HUB_OFFLINE is set"):
        fetch(monkeypatch, "hf://org/other")
    assert hub.requests == []


def test_a_note_that_was_cut_short_is_no_model(serve, monkeypatch, tmp_path):
    serve()
    fetch(monkeypatch)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (ref,) = (tmp_path / "cache").glob("*/refs/main")
    ref.write_text("")
    with pytest.raises(ModelNotFound, match="isn't in the cache"):
        fetch(monkeypatch)


def test_a_full_disk_is_named_before_anything_is_fetched(serve, monkeypatch):
    hub = serve()
    monkeypatch.setattr(hub_module.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10}))
    with pytest.raises(ModelFetchError, match=r"needs 139 bytes in .*, where 10 are free"):
        fetch(monkeypatch)
    assert hub.fetched() == set()


def test_hosts_that_are_not_allowed(serve, monkeypatch):
    hub = serve()
    monkeypatch.setenv(ALLOWED_HOSTS_ENV, "huggingface.co, *.hf.co")
    with pytest.raises(UriError, match=r"may not come from the host '127.0.0.1', only from huggingface.co"):
        fetch(monkeypatch)
    assert hub.requests == []
    monkeypatch.setenv(ALLOWED_HOSTS_ENV, "127.0.0.*")
    fetch(monkeypatch)


def test_a_redirect_to_another_host_is_refused(serve, monkeypatch):
    elsewhere = serve()
    hub = serve(redirect=elsewhere.endpoint.replace("127.0.0.1", "localhost"))
    monkeypatch.setenv(ALLOWED_HOSTS_ENV, "127.0.0.1")
    with pytest.raises(UriError, match="host 'localhost'"):
        fetch(monkeypatch)
    assert hub.requests and not elsewhere.requests
    monkeypatch.setenv(ALLOWED_HOSTS_ENV, "127.0.0.1,localhost")
    fetch(monkeypatch)


def test_schemes_that_are_not_allowed(monkeypatch):
    monkeypatch.setenv(ALLOWED_SCHEMES_ENV, "pvc, hf")
    with pytest.raises(UriError, match=f"isn't allowed here: {ALLOWED_SCHEMES_ENV} is pvc, hf"):
        resolve_model("/etc")
    with pytest.raises(ModelNotFound, match="not found"):
        resolve_model("pvc://claim/model")


def test_flags_say_what_is_allowed_to_every_process():
    @click.command()
    @model_source_options
    def command():
        click.echo(f"{os.environ[ALLOWED_SCHEMES_ENV]} {os.environ[ALLOWED_HOSTS_ENV]}")

    arguments = ["--allowed-model-schemes", "hf", "--allowed-model-hosts", "mirror.example"]
    environment = {ALLOWED_SCHEMES_ENV: "pvc", ALLOWED_HOSTS_ENV: ""}
    assert CliRunner().invoke(command, arguments, env=environment).output == "hf mirror.example\n"
    assert CliRunner().invoke(command, [], env=environment).output == "pvc \n"


@pytest.mark.parametrize("endpoint", ["ftp://host", "huggingface.co", "http://"])
def test_a_bad_endpoint(monkeypatch, endpoint):
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    with pytest.raises(UriError, match="HF_ENDPOINT="):
        resolve_model("hf://org/name")


# -- what is chosen -------------------------------------------------------------------------------------------------


def test_pickles_are_never_chosen():
    with pytest.raises(ModelNotFound, match=r"only pickled weights \(pytorch_model.bin\), which are never loaded"):
        weight_files(["config.json", "pytorch_model.bin"], None, "hf://a/b")
    with pytest.raises(ModelNotFound, match="no weights"):
        weight_files(["config.json"], None, "hf://a/b")
    with pytest.raises(ModelFormatError, match=r"names 'gone.safetensors', which the repository doesn't hold"):
        weight_files(["model.safetensors"], ["gone.safetensors"], "hf://a/b")


@given(names=st.lists(st.text("abmodels./-_123", min_size=1, max_size=12).map(lambda n: n + ".bin")))
def test_no_name_smuggles_a_pickle_in(names):
    chosen = describing_files(names)
    with contextlib.suppress(ModelNotFound):
        chosen += weight_files(names, None, "hf://a/b")
    assert not any(name.endswith(".bin") for name in chosen)


def test_progress_is_logged_now_and_then(caplog):
    now = [0.0]
    with caplog.at_level(logging.INFO), LogProgress("hf://a/b", 100, lambda: now[0]) as progress:
        for second, piece in [(1, 10), (11, 20), (12, 30), (25, 50), (26, -10)]:
            now[0] = second
            progress.advance(piece)
    lines = [(record.getMessage(), record.fields.get("done"), record.fields.get("percent")) for record in caplog.records]
    assert lines == [
        ("downloading", None, None), ("downloading", 30, 30.0), ("downloading", 110, 110.0), ("downloaded", 100, 100.0),
    ]  # fmt: skip
