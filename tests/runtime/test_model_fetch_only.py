"""--fetch-only: a model is brought here and checked, and somebody may ask how far it is."""

import hashlib
import json
import urllib.error
import urllib.request

import pytest

from paceline_runtime import fetch_only as module
from paceline_runtime.admin_auth import TokenFile
from paceline_runtime.fetch_only import checksum_of, fetch_only
from paceline_runtime.hub_progress import progress_for, tallied
from paceline_runtime.model_errors import ModelFormatError, ModelNotFound
from paceline_runtime.sockets import listen


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (folder / "config.json").write_bytes(b"{}")
    (folder / "sub" / "weights.safetensors").write_bytes(b"w" * 3_000_000)
    return folder


def test_a_folders_checksum_is_that_of_sha256sum(model):
    lines = [
        f"{hashlib.sha256(b'{}').hexdigest()}  config.json\n",
        f"{hashlib.sha256(b'w' * 3_000_000).hexdigest()}  sub/weights.safetensors\n",
    ]
    assert checksum_of(model) == f"sha256:{hashlib.sha256(''.join(lines).encode()).hexdigest()}"
    assert checksum_of(model / "config.json") == f"sha256:{hashlib.sha256(b'{}').hexdigest()}"


def test_another_checksum_is_an_error_that_names_both(model):
    uri, right = f"file://{model}", checksum_of(model)
    assert fetch_only(uri, None, right, None, None) == 0
    assert fetch_only(uri, None, None, None, None) == 0
    (model / "config.json").write_bytes(b"{ }")
    with pytest.raises(ModelFormatError, match=right):
        fetch_only(uri, None, right, None, None)
    with pytest.raises(ModelNotFound):
        fetch_only("file:///nowhere/at/all", None, None, None, None)


def ask(port, token, path="/admin/progress"):
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer)


def test_progress_is_told_to_those_who_have_the_token(model, tmp_path, monkeypatch):
    with listen("127.0.0.1", 0, "--admin-port") as probe:
        port = probe.getsockname()[1]
    token = tmp_path / "token"
    token.write_text("secret-token-of-the-test\n")
    seen = []

    def download(uri, revision):
        for total in (10, 90):
            with progress_for(uri, total) as progress:
                progress.advance(10)
                seen.append(ask(port, "secret-token-of-the-test"))
        for wrong, code in ((("another", "/admin/progress"), 401), (("secret-token-of-the-test", "/admin/knobs"), 404)):
            with pytest.raises(urllib.error.HTTPError) as raised:
                ask(port, *wrong)
            assert raised.value.code == code
            raised.value.close()
        return model

    monkeypatch.setattr(module, "resolve_model", download)
    assert fetch_only("hf://org/model", None, None, ("127.0.0.1", port), TokenFile(token)) == 0
    assert seen == [{"done": 10, "total": 10}, {"done": 20, "total": 100}]
    with pytest.raises(urllib.error.URLError):
        ask(port, "secret-token-of-the-test")  # the port goes with the download


def test_downloads_outside_a_tally_are_not_counted():
    with tallied() as tally, progress_for("a", 5) as progress:
        progress.advance(3)
        progress.advance(-1)
    with progress_for("b", 7) as progress:
        progress.advance(7)
    assert tally.read() == (2, 5)
