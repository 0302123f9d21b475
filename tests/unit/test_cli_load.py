"""The load generator against a small server of our own, and its figures."""

import json
import math

import pytest
from aiohttp import web

from paceline_cli.load import Outcome, percentile, run_load, summarise
from paceline_cli.workload import LoadRequest, mixed_lengths


async def _completions(request):
    body = await request.json()
    if body["prompt"] == "refuse me":
        return web.json_response({"error": {"message": "too busy"}}, status=429)
    response = web.StreamResponse()
    await response.prepare(request)
    made = body["max_tokens"] - (1 if body["prompt"] == "cut me" else 0)
    for _ in range(made):
        await response.write(b'data: {"choices": [{"text": "x"}]}\n\n')
    if body["prompt"] == "tell the end":
        await response.write(b'data: {"choices": [{"text": "", "finish_reason": "length"}]}\n\n')
    usage = json.dumps({"choices": [], "usage": {"completion_tokens": made}}).encode()
    await response.write(b"data: " + usage + b"\n\ndata: [DONE]\n\n")
    return response


@pytest.fixture
async def server():
    app = web.Application()
    app.router.add_post("/v1/completions", _completions)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def test_every_request_gets_an_outcome_in_order(server):
    requests = [LoadRequest("hello", 3), LoadRequest("refuse me", 3), LoadRequest("cut me", 5), LoadRequest("hello", 1)]
    seen = []
    outcomes = await run_load(server, "m", requests, progress=seen.append)
    assert [o.output_tokens for o in outcomes] == [3, 0, 4, 1]
    assert outcomes[0].error == outcomes[3].error == ""
    assert "429" in outcomes[1].error
    assert outcomes[2].error == "got 4 of 5 tokens"
    assert sorted(seen) == [0, 1, 3, 4]
    assert outcomes[1].first_token is None
    assert outcomes[0].sent <= outcomes[0].first_token <= outcomes[0].end


async def test_the_event_of_the_end_is_no_token(server):
    outcomes = await run_load(server, "m", [LoadRequest("tell the end", 3), LoadRequest("tell the end", 0)])
    assert [len(o.gaps) for o in outcomes] == [2, 0]
    assert outcomes[1].first_token == outcomes[1].last_token is not None  # a text that is all empty has begun, too


async def test_a_server_that_is_gone_is_an_error_not_an_exception():
    outcomes = await run_load("http://127.0.0.1:1", "m", [LoadRequest("hello", 1)])
    assert outcomes[0].error.startswith("ConnectError")


def test_summary_counts_failures_apart():
    outcomes = [Outcome(0.0, 1.0, 2.0, 10), Outcome(1.0, 1.5, 5.0, 30), Outcome(0.0, None, 0.1, 0, "HTTP 500")]
    summary = summarise(outcomes)
    assert (summary.requests, summary.failed) == (3, 1)
    assert summary.output_tokens_per_s == 40 / 5.0
    assert (summary.mean_latency, summary.p95_latency) == (3.0, 4.0)
    assert (summary.ttft_p50, summary.ttft_p95) == (0.5, 1.0)


def test_summary_of_nothing_says_why():
    with pytest.raises(ValueError, match="HTTP 500"):
        summarise([Outcome(0.0, None, 0.1, 0, "HTTP 500")])


def test_percentile_is_nearest_rank():
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([3.0, 1.0, 2.0], 1.0) == 3.0
    assert math.isnan(percentile([], 0.5))


def test_mixed_lengths_hold_their_shares_and_seed():
    requests = mixed_lengths(50, seed=3)
    lengths = sorted(r.max_tokens for r in requests)
    assert sum(8 <= n <= 24 for n in lengths) == 35
    assert sum(32 <= n <= 64 for n in lengths) == 10
    assert sum(96 <= n <= 128 for n in lengths) == 5
    assert requests == mixed_lengths(50, seed=3)
    assert requests != mixed_lengths(50, seed=4)
    assert len(mixed_lengths(7)) == 7
