"""The Lab's page on a running pod: open files, a gated API, and in a browser the live picture of its steps."""

import shutil
import threading

import httpx
import pytest
from serving_process import TOKEN

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SLOW = {"constant": 0.03, "decodeTokens": 0.0, "prefillTokens": 0.001, "contextTokens": 0.0, "prefillAttention": 0.0}


def test_the_page_is_open_and_what_it_asks_for_is_not(shared_runtime):
    with httpx.Client(base_url=shared_runtime.admin_url) as stranger:
        page = stranger.get("/lab/")
        assert page.status_code == 200
        assert "default-src 'self'" in page.headers["Content-Security-Policy"]
        assert stranger.get("/lab/lab.js").headers["Content-Type"].startswith("text/javascript")
        live = stranger.get("/lab/api/live").json()
        assert live == {"target": "clock", "needsToken": True, "prefix": "/admin", "scenarios": False}
        for path in ("/lab/../admin/knobs", "/lab/%2e%2e/admin/knobs", "/lab//admin/knobs", "/lab/x.py"):
            assert stranger.get(path).status_code in (401, 404), path
        assert stranger.get("/admin/timeline").status_code == 401
        assert stranger.post("/lab/api/run", json={}).status_code in (401, 404, 405)
    assert shared_runtime.admin.get("/lab", follow_redirects=True).status_code == 200


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
def test_live_mode_follows_a_running_pod(start_runtime):
    sync_api = pytest.importorskip("playwright.sync_api")
    runtime = start_runtime("--max-num-seqs", "4", "--served-model-name", "clock", model=SLOW)
    stop = threading.Event()

    def load():
        with httpx.Client(base_url=runtime.url, timeout=60) as client:
            while not stop.is_set():
                client.post("/v1/completions", json={"prompt": "word " * 40, "max_tokens": 12, "ignore_eos": True})

    clients = [threading.Thread(target=load) for _ in range(3)]
    for client in clients:
        client.start()
    try:
        with sync_api.sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            page.set_default_timeout(30_000)
            page.goto(f"{runtime.admin_url}/lab/")
            page.fill("#token", "wrong")
            page.click("text=Watch")
            sync_api.expect(page.locator("#live-state")).to_contain_text("refused the admin token", timeout=30_000)
            page.fill("#token", TOKEN)
            page.click("text=Watch")
            page.wait_for_selector("#live-picture g.stay")
            sync_api.expect(page.locator("#live-state")).to_contain_text("running", timeout=30_000)
            page.wait_for_selector("#live-picture table button")
            page.click("#pause")
            page.locator("#live-picture table button").first.click()
            sync_api.expect(page.locator("#live-chosen-body")).to_contain_text("generating")
            page.click("#pause")
            runtime.knobs(maxNumSeqs=2)
            sync_api.expect(page.locator("#live-picture")).to_contain_text("knobs: epoch", timeout=30_000)
            browser.close()
    finally:
        stop.set()
        for client in clients:
            client.join()
