"""Pods in virtual time and situations that the tuner's tests share."""

import json
from dataclasses import replace

from aiohttp import web

from paceline_core.knobs import Knobs, knobs_to_wire
from paceline_core.step_time import StepModel
from paceline_core.uneven import UnevenDevice
from paceline_core.wire import to_json
from paceline_operator.tuning.brain import Brain, Situation
from paceline_operator.tuning.decide import decide
from paceline_operator.tuning.facts import Ask, PodFact, Tell
from paceline_sim.generate import Lengths, poisson
from paceline_sim.live import VirtualPod

DEVICE = UnevenDevice(StepModel(0.012, 2e-4, 6e-5, 2.5e-7, 1e-9), 8, 64, 20_000, 2.0)
INTERVAL = 10.0
BLOCKS = 8000


def traffic(rate, seconds, seed=0, prompts=None):
    return poisson(rate, seconds, Lengths(prompts or {50: 150, 100: 400}), Lengths({50: 40, 100: 90}), seed=seed)


class Service:
    """Pods, a brain, and what the operator would do between them."""

    def __init__(
        self, knobs, *, pods=3, rate=6.0, seconds=400.0, ttft=1.0, tpot=0.06, bounds=None, device=DEVICE, prompts=None
    ):
        self.base, self.now, self.mode, self.hash = knobs, 0.0, "Auto", "h1"
        self.ttft, self.tpot, self.bounds, self.busy = ttft, tpot, bounds or {}, ""
        self.pods = {}
        for number in range(pods):
            name = f"pod-{number}"
            pod = self.pods[name] = VirtualPod(knobs, device, num_blocks=BLOCKS, max_model_len=1 << 20, name=name)
            for request in traffic(rate, seconds, seed=number, prompts=prompts).requests:
                pod.send(request)
        self.brain, self.told, self.refuse, self.deaf, self.process = Brain(), [], {}, set(), {}
        self.questions = []

    def run(self, seconds, every=2.0):
        end = self.now + seconds
        while self.now < end:
            self.now += every
            for name, pod in self.pods.items():
                pod.run(self.now)
                if name not in self.deaf:
                    ledger = self.brain.ledger(name)
                    ledger.absorb(self.answer(pod, ledger), self.now)
            self.look()
        return self

    def answer(self, pod, ledger):
        return pod.observe(ledger.cursor)

    def look(self, answer=None):
        situation = self.situation()
        for effect in self.brain.look(situation, self.now, answer):
            if isinstance(effect, Tell):
                self.told.append(effect)
            elif isinstance(effect, Ask):
                question = self.brain.question(situation, effect, self.now)
                self.brain.searching = False
                if question is not None:
                    self.questions.append(question)
                    self.apply()
                    self.look(decide(question))
        self.apply()

    def apply(self):
        for name, pod in self.pods.items():
            if name not in self.refuse and pod.knobs != self.wanted(name):
                pod.set_knobs(self.wanted(name))

    def wanted(self, name):
        state = self.brain.state
        trial = state.trial.tried if state.trial is not None and name in state.trial.pods else {}
        return self.base.updated({**state.override, **trial})

    def situation(self):
        facts = tuple(
            PodFact(
                name, self.process.get(name, name), applied=pod.knobs == self.wanted(name), refused=self.refuse.get(name, "")
            )
            for name, pod in self.pods.items()
        )
        knobs = {**knobs_to_wire(self.base), **self.brain.state.override}
        return Situation(
            "team/chat", self.mode, self.hash, knobs, self.bounds, facts, self.ttft, self.tpot, 95.0, INTERVAL, self.busy
        )

    @property
    def reasons(self):
        return [tell.reason for tell in self.told]


def bad_start(**options):
    """Three pods with one slot each, under three times the traffic that they can serve."""
    return Service(Knobs(max_num_seqs=1), **options)


class FakePod:
    """Serves a virtual pod's observations over HTTP; `spoil` may rewrite the JSON or return a whole web response."""

    def __init__(self, pod, spoil=None):
        self.pod, self.spoil, self.asked = pod, spoil, 0

    async def observe(self, request):
        self.asked += 1
        document = to_json(self.pod.observe(int(request.query.get("since", 0))))
        if self.spoil is not None:
            document = await self.spoil(document, request)
        if isinstance(document, web.StreamResponse):
            return document
        return web.Response(text=json.dumps(document), content_type="application/json")  # also NaN, as a careless pod would


def seen(document, **changes):
    return replace(document, **changes)
