"""The whole tuner on virtual pods: the real loop and store, an API server that can be away, what a reconcile would do."""

import asyncio
import copy

from operator_kit import body
from tuning_kit import BLOCKS, DEVICE, traffic

from paceline_core.knobs import Knobs, knobs_to_wire
from paceline_operator.effective import effective, read_override, tuned_name
from paceline_operator.errors import ApiUnavailable
from paceline_operator.knob_sync import KnobState, PodKnobs, Target
from paceline_operator.metrics import Metrics
from paceline_operator.names import CONTAINER, SERVICE_LABEL, digest
from paceline_operator.settings import Settings
from paceline_operator.spec import parse_service
from paceline_operator.store import Key, Store
from paceline_operator.tuning.decide import decide
from paceline_operator.tuning.loop import Tuner
from paceline_operator.tuning.overrides import IN_FORCE, Trying, read_trying
from paceline_sim.live import VirtualPod

KEY = Key("team-a", "chat")
INTERVAL = 10.0
AUTO = {
    "model": {"uri": "hf://org/model"},
    "replicas": 3,
    "batching": {"maxNumSeqs": 1},
    "slo": {"ttft": "1s", "tpot": "60ms"},
    "tuning": {"mode": "Auto"},
}


class Api:
    """Takes what is applied and told; `away` refuses both."""

    def __init__(self):
        self.away, self.version, self.applied, self.told = False, 1, [], []

    async def apply(self, child, manager):
        if self.away:
            raise ApiUnavailable("the API server is away")
        self.applied.append(child["data"])
        return self.stamp(child)

    async def create_event(self, event):
        if self.away:
            raise ApiUnavailable("the API server is away")
        self.told.append(event["reason"])

    def stamp(self, child):
        self.version += 1
        stamped = copy.deepcopy(child)
        stamped["metadata"].update(uid=stamped["metadata"]["name"], resourceVersion=str(self.version))
        return stamped


class Acceptor:
    def accept(self, key, document):
        return parse_service(document)


class InThisProcess(Tuner):
    """Its twin needs no process of its own: `_decide` is the world's."""


class World:
    """A service with three pods under traffic. `deaf` pods take no knobs over; `hold` keeps the twin's answers back."""

    def __init__(self, spec=AUTO, *, rate=4.0, config_map=None):
        self.now, self.back, self.spec, self.api, self.store = 10_000.0, 0.0, spec, Api(), Store()
        self.deaf, self.refusing, self.asked, self.targets, self.knobs = set(), {}, [], {}, {KEY: {}}
        self.answers = asyncio.Event()
        self.answers.set()
        self.pods = {f"chat-{number}": self._pod(number, rate) for number in range(3)}
        deployment = {"updatedReplicas": 3, "readyReplicas": 3, "replicas": 3, "observedGeneration": 1}
        meta = {"name": "chat", "namespace": "team-a", "uid": "d", "generation": 1, "labels": {SERVICE_LABEL: "chat"}}
        self.store.put("Deployment", {"metadata": meta, "spec": {"replicas": 3}, "status": deployment})
        if config_map is not None:
            self.store.put("ConfigMap", self.api.stamp(config_map))
        self.edit(spec)
        self.restart()

    def _pod(self, number, rate):
        name = f"chat-{number}"
        meta = {"name": name, "namespace": "team-a", "uid": name, "labels": {SERVICE_LABEL: "chat"}}
        container = {"name": CONTAINER, "ready": True, "containerID": "c", "state": {"running": {}}}
        ready = [{"type": "Ready", "status": "True"}]
        status = {"podIP": f"10.0.0.{number}", "conditions": ready, "containerStatuses": [container]}
        self.store.put("Pod", {"metadata": meta, "status": status})
        knobs = parse_service(body(self.spec)).knobs
        pod = VirtualPod(knobs, DEVICE, num_blocks=BLOCKS, max_model_len=1 << 20, now=self.now, name=name)
        for request in traffic(rate, 2000, seed=number).requests:
            pod.send(request.at(request.arrival + self.now))
        return pod

    def edit(self, spec):
        """Change the InferenceService, as its owner would."""
        self.spec = spec
        self.store.put("InferenceService", body(spec))
        self.reconcile()

    def restart(self):
        """Begin with a new operator process."""
        self.tuner = InThisProcess(
            Settings(tuning_interval=INTERVAL), self.api, self.store, Acceptor(), Metrics(), self.targets, self.knobs,
            lambda key: None, clock=lambda: self.now - self.back, scraper=self,
        )  # fmt: skip
        self.tuner._decide = self._decide

    async def _decide(self, question):
        self.asked.append(question)
        await self.answers.wait()
        return decide(question)

    async def look(self, sources):
        """Read pods, as the scraper does."""
        for source, ledger in sources:
            ledger.absorb(self.pods[source.name].observe(ledger.cursor), self.now - self.back)

    def reconcile(self):
        """Do what a pass of the controller does about knobs."""
        service, live = parse_service(body(self.spec)), self.config_map
        found = effective(service, read_override(live))
        if found.dropped:
            kept = {key: text for key, text in live["data"].items() if key not in IN_FORCE}
            self.store.put("ConfigMap", self.api.stamp(live | {"data": kept}))
        auto = live is not None and service.tuning.mode == "Auto"
        trial = read_trying(live, found.spec_hash) if auto else Trying()
        wire = knobs_to_wire(found.knobs)
        about = digest([wire, sorted(trial.pods), dict(trial.knobs)] if trial.pods else wire)
        self.targets[KEY] = target = Target(wire, about, "r", "token", trial.pods, trial.knobs)
        for name, pod in self.pods.items():
            wanted = Knobs().updated({**wire, **target.knobs_of(name)})
            if name not in self.deaf and name not in self.refusing and pod.knobs != wanted:
                pod.set_knobs(wanted)
            synced = PodKnobs(KnobState.SYNCED, verified=(about if pod.knobs == wanted else "", f"{name}/c"))
            refused = PodKnobs(KnobState.REFUSED, self.refusing.get(name, ""))
            self.knobs[KEY][name] = refused if name in self.refusing and pod.knobs != wanted else synced

    async def run(self, seconds, until=lambda: False):
        """Let time pass; `until` may end it early. Returns whether it did."""
        end = self.now + seconds
        while self.now < end and not until():
            self.now += 2.0
            for pod in self.pods.values():
                pod.run(self.now)
            await self.tuner.round()
            for _ in range(3):
                await asyncio.sleep(0)  # the twin's answer
            self.reconcile()
        return until()

    @property
    def config_map(self):
        return self.store.get(KEY, "ConfigMap", tuned_name("chat"))

    @property
    def state(self):
        return self.tuner._tuned[KEY].brain.state

    @property
    def running(self):
        """How many slots each pod has."""
        return [pod.knobs.max_num_seqs for pod in self.pods.values()]
