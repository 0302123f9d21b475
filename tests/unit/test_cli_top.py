"""`paceline top`: figures from two readings of metrics, rows of a fleet, and the screen with its keys."""

import math

import click
import pytest
from click.testing import CliRunner
from textual.widgets import DataTable, Static

from paceline_cli.__main__ import cli
from paceline_cli.top_fleet import Fleet
from paceline_cli.top_metrics import between, quantile, read
from paceline_cli.top_view import COLUMNS, TopApp, cells, matching
from paceline_core.errors import FormatError, PacelineError
from paceline_operator.names import base_name


def exposition(running=2, waiting=1, kv=0.5, tokens=100, ttft=(1, 2, 3)):
    labels = 'model_name="m",engine="0"'
    low, middle, top = ttft
    return f"""# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{{labels}}} {running}
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{{labels}}} {waiting}
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{{labels}}} {kv}
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{{{labels}}} {tokens}
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{{{labels},le="0.1"}} {low}
vllm:time_to_first_token_seconds_bucket{{{labels},le="1.0"}} {middle}
vllm:time_to_first_token_seconds_bucket{{{labels},le="+Inf"}} {top}
vllm:time_to_first_token_seconds_count{{{labels}}} {top}
vllm:time_to_first_token_seconds_sum{{{labels}}} 1
"""


def test_figures_between_two_readings():
    before, now = read(exposition(), 10.0), read(exposition(tokens=300, ttft=(1, 12, 13)), 12.0)
    activity = between([(now, before), (read(exposition(running=4, kv=0.7), 12.0), None)], 50)
    assert (activity.pods, activity.running, activity.waiting) == (2, 6, 2)
    assert activity.kv_usage == pytest.approx(0.6)
    assert activity.token_rate == 100
    assert activity.ttft == pytest.approx(0.1 + 0.9 * 0.5)  # the tenth of ten between 0.1 and 1 s
    assert activity.tpot is None


def test_a_pod_that_was_restarted_has_no_rates():
    before, now = read(exposition(tokens=500), 10.0), read(exposition(tokens=3), 12.0)
    assert between([(now, before)], 95).token_rate == 0


def test_quantiles():
    assert quantile({}, 0.5) is None
    assert quantile({0.1: 0, math.inf: 0}, 0.5) is None
    assert quantile({0.1: 4, 1.0: 4, math.inf: 4}, 0.5) == pytest.approx(0.05)
    assert quantile({0.1: 0, 1.0: 0, math.inf: 4}, 0.5) == 1.0  # beyond the last bound nothing is known


@pytest.mark.parametrize("text", ["{", "vllm:num_requests_running one", 'vllm:x{le="'])
def test_what_is_no_metrics_is_refused(text):
    with pytest.raises(FormatError):
        read(text, 0.0)


def service(name, **status):
    conditions = [{"type": "Ready", "status": "True"}]
    return {
        "metadata": {"namespace": "chat", "name": name},
        "spec": {"replicas": 2, "slo": {"ttft": "500ms", "tpot": "fast", "percentile": 90}},
        "status": {"readyReplicas": 2, "strategy": "continuous", "conditions": conditions} | status,
    }


def pod(name, of, ready="True"):
    return {
        "metadata": {"namespace": "chat", "name": name, "uid": name, "labels": {"paceline.io/service": of}},
        "status": {"conditions": [{"type": "Ready", "status": ready}]},
    }


class FakeCluster:
    def __init__(self):
        self.looks = 0
        self.broken = False
        self.listed = [
            service("small", tuning={"mode": "Auto", "state": "Canary", "lastChange": {"why": "queue grew"}}),
            service("big", tuning="Off"),
            service("down", conditions=[{"type": "Ready", "status": "False", "reason": "CrashLoop"}]),
        ]

    def services(self):
        if self.broken:
            raise PacelineError("the API server can't be reached")
        self.looks += 1
        return self.listed

    def pods(self):
        return [pod("a", "big"), pod("b", "big"), pod("c", "small"), pod("d", "down", ready="False")]

    def metrics(self, pod):
        if pod["metadata"]["name"] == "b":
            raise OSError("silent")
        late = (0, 0, 10 * self.looks) if pod["metadata"]["name"] == "c" else (10 * self.looks,) * 3
        return exposition(tokens=1000 * self.looks, ttft=late)


@pytest.fixture
def fleet():
    times = iter(range(1000))
    return Fleet(FakeCluster(), clock=lambda: next(times))


def test_rows_of_a_fleet(fleet):
    fleet.look()
    big, down, small = fleet.look()
    assert (big.name, big.ready, big.replicas, big.silent) == ("big", "yes", "2/2", 1)
    assert big.activity.token_rate > 0
    assert not big.misses("ttft")
    assert (small.tuner, small.change) == ("Auto Canary", "queue grew")
    assert small.misses("ttft")
    assert not small.misses("tpot")  # an objective that can't be read is none
    assert (down.ready, down.activity.pods, down.activity.ttft) == ("CrashLoop", 0, None)


def test_pods_of_a_service_whose_name_is_no_label(fleet):
    fleet.cluster.listed = [service("llama-3.1-8b")]
    fleet.cluster.pods = lambda: [pod("a", base_name("llama-3.1-8b"))]
    fleet.look()
    (row,) = fleet.look()
    assert row.activity.pods == 1


def test_sorting_and_filtering(fleet):
    fleet.look()
    rows = fleet.look()
    titles = [column.title for column in COLUMNS]
    by = lambda title, words="", descending=False: [  # noqa: E731
        row.name for row in matching(rows, words, titles.index(title), descending=descending)
    ]
    assert by("SERVICE") == ["big", "down", "small"]
    assert by("TTFT", descending=True)[0] == "small"
    assert by("READY")[0] == "down"
    assert by("SERVICE", "chat canary") == ["small"]
    assert by("SERVICE", "nothing") == []
    for title in titles:
        assert len(by(title)) == 3


def test_cells_say_objectives_and_silence(fleet):
    fleet.look()
    big, down, small = (" | ".join(cell.plain for cell in cells(row)) for row in fleet.look())
    assert "2/2 (1 silent)" in big
    assert "CrashLoop" in down
    assert "1.00 s ≤ 500 ms" in small


async def test_the_screen_and_its_keys(fleet):
    app = TopApp(fleet, every=0.05)
    async with app.run_test(size=(150, 20)) as pilot:
        table = app.query_one(DataTable)

        async def until(condition):
            for _ in range(200):
                await pilot.pause(0.02)
                if condition():
                    return
            raise AssertionError(app.query_one("#head", Static).render())

        await until(lambda: table.row_count == 3)
        assert "chat/big" in str(table.get_row_at(0)[0])
        await pilot.press("r")
        assert "chat/small" in str(table.get_row_at(0)[0])
        for _ in range(3):
            await pilot.press("s")
        assert any("RUN ▼" in str(column.label) for column in table.columns.values())
        await pilot.press("slash", *"down", "enter")
        await until(lambda: table.row_count == 1)
        assert "chat/down" in str(table.get_row_at(0)[0])
        await pilot.press("escape")
        await until(lambda: table.row_count == 3)
        fleet.cluster.broken = True
        await until(lambda: "can't be reached" in str(app.query_one("#head", Static).render()))
        assert table.row_count == 3  # what was known stays
        fleet.cluster.broken = False
        await until(lambda: "3 services" in str(app.query_one("#head", Static).render()))
        await pilot.press("q")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--json"], "--json needs --once"), ([], "needs a terminal"), (["--kubeconfig", "/no/such"], "does not exist")],
)
def test_bad_options(arguments, words):
    result = CliRunner().invoke(cli, ["top", *arguments])
    assert result.exit_code == 2
    assert words in result.output


@pytest.mark.parametrize(
    "content", [b"{}", b"", b"words", b"- 1", b"a: [1", b"\xff\xfe\xfd", b"clusters: 5\ncurrent-context: a", b"[" * 9999]
)
@pytest.mark.parametrize("command", [["top", "--once"], ["tune", "status"]], ids=" ".join)
def test_an_unusable_kubeconfig_is_one_line(tmp_path, command, content):
    config = tmp_path / "config"
    config.write_bytes(content)
    result = CliRunner().invoke(cli, [*command, "--kubeconfig", str(config)], standalone_mode=False)
    assert isinstance(result.exception, PacelineError | click.ClickException)
    assert "no usable kubeconfig" in str(result.exception)
    assert "\n" not in str(result.exception)
