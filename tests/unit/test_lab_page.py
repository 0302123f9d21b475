"""The Lab's page in a real browser: presets, controls by mouse and keyboard, the link, narrow and dark screens."""

import json
import re
import shutil
import threading

import pytest

from paceline_cli.lab_server import LabServer

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

pytestmark = [pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine"), pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def url():
    server = LabServer(0, None)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server.url
    server.shutdown()
    server.server_close()


@pytest.fixture
def page(browser, url):
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    troubles = []
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("requestfailed", lambda request: troubles.append(request.url))
    page.set_default_timeout(30_000)
    page.goto(url)
    page.wait_for_selector(".picture svg")
    yield page
    page.close()
    assert troubles == []


def figures(page):
    """Return what the two pictures say, by name."""
    return [
        {row.locator("dt").inner_text(): row.locator("dd").inner_text() for row in picture.locator("dl > div").all()}
        for picture in page.locator(".picture").all()
    ]


def expect_figures(page, index, **wanted):
    for name, value in wanted.items():
        row = page.locator(".picture").nth(index).locator("dl > div", has_text=name.replace("_", " "))
        sync_api.expect(row.locator("dd")).to_have_text(value)


def test_it_opens_with_the_first_published_example(page):
    expect_figures(page, 0, steps="14", slots_used="57 %")
    expect_figures(page, 1, steps="10", slots_used="80 %")
    assert page.locator("[data-preset=varied]").get_attribute("aria-pressed") == "true"


def test_presets_give_the_published_figures(page):
    page.click("[data-preset=stream]")
    expect_figures(page, 0, steps="560", slots_used="47 %", mean_latency="401.7")
    expect_figures(page, 1, steps="330", slots_used="80 %", mean_latency="118.3")
    page.click("[data-preset=stream-dynamic]")
    expect_figures(page, 0, steps="665", slots_used="39 %", mean_latency="418.3")
    page.click("[data-preset=even]")
    expect_figures(page, 0, steps="8")
    assert figures(page)[0] == figures(page)[1]
    page.click("[data-preset=long-prompt]")
    expect_figures(page, 0, longest_pause="33")
    expect_figures(page, 1, longest_pause="2.3")


def test_controls_change_the_scenario(page):
    page.select_option("#strategy-a", "continuous")
    expect_figures(page, 0, steps="10")
    page.fill("#slots", "8")
    expect_figures(page, 0, steps="8")
    page.click("#even")
    expect_figures(page, 0, steps="4", slots_used="100 %")
    page.click("#vary")
    expect_figures(page, 1, steps="8")


def test_bad_values_are_said_and_the_picture_stays(page):
    page.fill("#slots", "99")
    sync_api.expect(page.locator("#error")).to_have_text("slots: 99 is out of bounds, expected 1 to 32 slots")
    assert page.locator(".picture svg").count() == 2
    page.fill("#slots", "")
    sync_api.expect(page.locator("#error")).to_contain_text("slots: '' is no number")
    page.fill("#lengths", "8, two")
    sync_api.expect(page.locator("#error")).to_contain_text("lengths")
    page.fill("#lengths", "4, 4")
    page.fill("#slots", "2")
    sync_api.expect(page.locator("#error")).to_be_empty()
    expect_figures(page, 0, steps="4")


def test_time_is_played_stepped_and_scrubbed(page):
    page.click("#rewind")
    sync_api.expect(page.locator("#clock")).to_have_text("0 of 14")
    sync_api.expect(page.locator(".queue").first).to_contain_text("4 waiting")
    page.click("#forward")
    sync_api.expect(page.locator("#clock")).to_have_text("1 of 14")
    sync_api.expect(page.locator("#says")).to_have_text(re.compile("static: A, B, C, D running, 4 waiting."))
    page.click("#back")
    sync_api.expect(page.locator("#clock")).to_have_text("0 of 14")
    page.click("#playing")
    sync_api.expect(page.locator("#playing")).to_have_text("Pause")
    sync_api.expect(page.locator("#clock")).not_to_have_text("0 of 14")
    page.click("#playing")
    stopped = page.locator("#clock").inner_text()
    page.wait_for_timeout(100)
    assert page.locator("#clock").inner_text() == stopped


def test_the_keyboard_is_enough(page):
    page.focus("[data-preset=stream]")
    page.keyboard.press("Enter")
    expect_figures(page, 0, steps="560")
    page.focus("#time")
    page.keyboard.press("Home")
    sync_api.expect(page.locator("#clock")).to_have_text("0 of 560")
    page.focus("#forward")
    page.keyboard.press("Space")
    sync_api.expect(page.locator("#clock")).not_to_have_text("0 of 560")
    page.locator("details summary").first.focus()
    page.keyboard.press("Enter")
    page.locator("details button", has_text="D").first.focus()
    page.keyboard.press("Enter")
    sync_api.expect(page.locator("#chosen-title")).to_have_text("Where request D's time went")


def test_a_click_on_a_request_explains_its_time(page):
    page.locator(".picture").nth(1).locator("g.of-4").first.click()
    sync_api.expect(page.locator("#chosen-title")).to_have_text("Where request E's time went")
    sync_api.expect(page.locator("#chosen-body")).to_contain_text("It got the slot of B.")
    sync_api.expect(page.locator("#chosen-body")).to_contain_text("for a free slot")


def test_a_link_reproduces_the_state(page, browser, url):
    page.click("[data-preset=long-prompt]")
    expect_figures(page, 0, longest_pause="33")
    page.fill("#slots", "5")
    sync_api.expect(page.locator(".picture svg").first).to_have_attribute("aria-label", re.compile("5 slots"))
    page.focus("#time")
    page.keyboard.press("Home")
    page.click("#forward")
    page.click("#link")
    before, clock, link = figures(page), page.locator("#clock").inner_text(), page.url
    other = browser.new_page()
    other.goto(link)
    other.wait_for_selector(".picture svg")
    sync_api.expect(other.locator("#clock")).to_have_text(clock)
    assert figures(other) == before
    other.goto(url + "#a=%7Bbroken")
    other.reload()
    other.wait_for_selector(".picture svg")
    other.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_it_fits_the_screen_and_axe_finds_nothing_serious(browser, url, width, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.goto(url)
    page.wait_for_selector(".picture svg")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.locator("g.stay").first.click()
    page.locator("details summary").first.click()
    found = axe.Axe().run(page).response["violations"]
    page.close()
    serious = [v for v in found if v["impact"] in ("serious", "critical")]
    assert serious == [], json.dumps([(v["id"], [n["html"] for n in v["nodes"]]) for v in serious], indent=1)
