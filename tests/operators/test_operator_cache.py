"""Where models are kept between pods, and the Job that fetches one before any pod starts."""

import copy

import pytest
from operator_fakes import ALL_APIS
from operator_kit import MINIMAL, service, settings
from operator_pods import ended, running, waiting
from operator_world import KEY, World

from paceline_operator.api_kinds import Apis
from paceline_operator.errors import SpecError
from paceline_operator.names import FETCHER, NAME_LABEL, SERVICE_LABEL, selector
from paceline_operator.pods import instances
from paceline_operator.policy import check_policy, policy_problems, rules_of
from paceline_operator.render import render

SUM = "sha256:" + "ab" * 32
PRELOADED = MINIMAL | {"cache": {"size": "20Gi", "preload": True, "checksum": SUM}, "replicas": 2}
GPU = {"resource": "nvidia.com/gpu", "count": 1, "product": "H100"}


def children(spec, apis=ALL_APIS):
    return {child["kind"]: child for child in render(service(spec), settings(), apis)}


def pod_spec(spec):
    return children(spec)["Deployment"]["spec"]["template"]["spec"]


def models_volume(spec):
    return next(volume for volume in pod_spec(spec)["volumes"] if volume["name"] == "models")


@pytest.mark.parametrize(
    ("cache", "source"),
    [
        ({"claim": "shared"}, {"persistentVolumeClaim": {"claimName": "shared"}}),
        ({"size": "20Gi"}, {"persistentVolumeClaim": {"claimName": "chat-models"}}),
        ({"nodePath": "/srv/models"}, {"hostPath": {"path": "/srv/models", "type": "DirectoryOrCreate"}}),
    ],
)
def test_pods_keep_models_where_the_spec_says(cache, source):
    spec = MINIMAL | {"cache": cache}
    assert models_volume(spec) == {"name": "models"} | source
    (container,) = pod_spec(spec)["containers"]
    assert {"name": "models", "mountPath": "/var/cache/models"} in container["volumeMounts"]
    assert {"name": "HF_HOME", "value": "/var/cache/models"} in container["env"]
    assert ("PersistentVolumeClaim" in children(spec)) == ("size" in cache)
    assert "Job" not in children(spec)


def test_a_claim_is_made_as_asked():
    cache = {"size": "20Gi", "storageClass": "nfs", "accessMode": "ReadWriteOnce"}
    claim = children(MINIMAL | {"cache": cache})["PersistentVolumeClaim"]
    expected = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "20Gi"}}, "storageClassName": "nfs"}
    assert claim["spec"] == expected


@pytest.mark.parametrize(
    ("cache", "field"),
    [
        ({}, "spec.cache"),
        ({"claim": "a", "size": "1Gi"}, "spec.cache"),
        ({"nodePath": "/a", "preload": True}, "spec.cache.preload"),
        ({"claim": "a", "checksum": SUM}, "spec.cache.checksum"),
        ({"claim": "a", "preload": True, "checksum": "md5:1"}, "spec.cache.checksum"),
        ({"nodePath": "relative"}, "spec.cache.nodePath"),
    ],
)
def test_a_cache_that_makes_no_sense_is_refused_with_its_field(cache, field):
    with pytest.raises(SpecError) as raised:
        service(MINIMAL | {"cache": cache})
    assert field in [problem.field for problem in raised.value.problems]


def test_a_model_that_is_no_download_needs_no_cache():
    with pytest.raises(SpecError, match="hf://"):
        service({"model": {"uri": "pvc://claim/path"}, "cache": {"claim": "a"}})


@pytest.mark.parametrize("path", ["/srv/models", "/srv/models/team", "/srv", "/srv/modelsX", "/srv/models/../../etc"])
def test_a_folder_of_the_node_must_be_allowed(path):
    asked = service(MINIMAL | {"cache": {"nodePath": path}})
    with pytest.raises(SpecError, match=r"spec.cache.nodePath"):
        check_policy(asked, settings())
    rules = rules_of(settings())
    allowed = type(rules)(author="x", model_schemes=("hf",), images=rules.images, host_paths=("/srv/models",))
    refused = [problem.field for problem in policy_problems(asked, allowed)]
    assert refused == ([] if path in ("/srv/models", "/srv/models/team") else ["spec.cache.nodePath"])


def test_the_job_is_the_runtime_told_to_end():
    spec = PRELOADED | {"accelerator": GPU, "nodeSelector": {"pool": "a"}}
    found = children(spec)
    runtime = found["Deployment"]["spec"]["template"]
    job = found["Job"]["spec"]["template"]
    (ours,), (theirs,) = job["spec"]["containers"], runtime["spec"]["containers"]
    assert ours["args"] == [*theirs["args"], "--fetch-only", "--checksum", SUM]
    assert ours["image"] == theirs["image"]
    assert ours["securityContext"] == theirs["securityContext"]
    assert ours["volumeMounts"] == theirs["volumeMounts"]
    assert not {"readinessProbe", "livenessProbe", "startupProbe"} & set(ours)
    assert "nvidia.com/gpu" not in str(ours["resources"])  # it needs no device, and must not wait for one
    assert job["spec"]["nodeSelector"] == {"pool": "a"}
    assert job["spec"]["restartPolicy"] == "OnFailure"


def test_nothing_takes_the_jobs_pods_for_servers():
    labels = children(PRELOADED)["Job"]["spec"]["template"]["metadata"]["labels"]
    assert labels[SERVICE_LABEL] == "chat"  # they are watched
    assert any(labels.get(key) != value for key, value in selector("chat").items())
    fetcher = running()
    fetcher["metadata"]["labels"] = labels
    assert instances([fetcher]) == []


def test_another_model_is_another_job_and_another_version_is_not():
    def name(spec, **environment):
        return {c["kind"]: c for c in render(service(spec), settings(**environment), ALL_APIS)}["Job"]["metadata"]["name"]

    assert name(PRELOADED) == name(PRELOADED, RUNTIME_IMAGE="registry/runtime:2") == name(PRELOADED | {"replicas": 9})
    assert name(PRELOADED) != name(PRELOADED | {"model": {"uri": "hf://org/other"}})
    long = {c["kind"]: c for c in render(service(PRELOADED, name="a" * 63), settings(), ALL_APIS)}["Job"]
    assert len(long["metadata"]["name"]) <= 63


class Preload:
    """A service whose model is fetched; the Job and its pod are in whatever state is set."""

    def __init__(self, spec=PRELOADED):
        self.world = World()
        self.world.reconciler.progress = self._progress
        self.told = None
        self.world.manifest(spec)

    async def _progress(self, address, token):
        assert (address, len(token)) == ("10.0.0.1", 64)
        return self.told

    async def run(self):
        return await self.world.run()

    @property
    def deployment(self):
        return self.world.cluster.objects["Deployment", "chat"]

    def job(self, *conditions):
        name = next(name for kind, name in self.world.cluster.objects if kind == "Job")
        found = copy.deepcopy(self.world.cluster.objects["Job", name])
        found["status"] = {"conditions": [{"type": kind, "status": "True", "message": "why"} for kind in conditions]}
        self.world.sees("Job", found)

    def pod(self, found):
        found["metadata"]["labels"] = {SERVICE_LABEL: "chat", NAME_LABEL: FETCHER}
        self.world.sees("Pod", found)

    def says(self, kind):
        found = self.world.condition(kind)
        return found["status"], found["reason"]

    @property
    def status(self):
        return self.world.store.service(KEY)["status"]


async def test_no_pod_starts_before_its_model_is_there():
    preload = Preload()
    result = await preload.run()
    assert preload.deployment["spec"]["replicas"] == 0
    assert preload.says("Ready") == preload.says("ModelReady") == ("False", "Fetching")
    assert preload.says("Progressing") == ("True", "Fetching")
    assert preload.status["cache"] == {"state": "Fetching"}
    assert result.again == 5.0
    preload.job("Complete")
    await preload.run()
    assert preload.deployment["spec"]["replicas"] == 2
    assert preload.status["cache"] == {"state": "Ready"}
    assert preload.says("Ready")[1] != "Fetching"
    await preload.run()
    assert preload.world.cluster.calls == []


async def test_progress_stands_in_the_status():
    preload = Preload()
    await preload.run()
    preload.pod(running("fetch-1"))
    preload.told = (3 * 2**30, 12 * 2**30)
    await preload.run()
    assert preload.status["cache"] == {"state": "Fetching", "doneBytes": 3 * 2**30, "totalBytes": 12 * 2**30}
    assert "25 % of 12.0 GiB" in preload.world.condition("Ready")["message"]
    assert preload.status["podCount"] == 0  # it is nobody who could be asked for knobs


async def test_a_download_that_fails_is_told_with_its_remedy():
    preload = Preload()
    await preload.run()
    gated = "error: hf://org/model is gated: accept its licence at https://hub/org/model and set HF_TOKEN"
    preload.pod(waiting("CrashLoopBackOff", name="fetch-1", last=ended(2, gated), restarts=2))
    await preload.run()
    assert preload.says("Ready") == ("False", "ModelGated")
    assert "secretRef" in preload.world.condition("Ready")["message"]
    assert preload.says("Progressing") == ("False", "Blocked")
    preload.job("Failed")
    preload.world.store.remove("Pod", preload.world.store.all(KEY, "Pod")[0])
    await preload.run()
    assert preload.says("Ready") == ("False", "FetchFailed")
    assert "delete the Job chat-fetch-" in preload.world.condition("Ready")["message"]
    assert preload.status["cache"] == {"state": "Failed"}
    assert preload.deployment["spec"]["replicas"] == 0


async def test_the_earlier_model_is_served_while_the_next_one_is_fetched():
    preload = Preload()
    await preload.run()
    preload.job("Complete")
    await preload.run()
    before = copy.deepcopy(preload.deployment["spec"]["template"])
    preload.world.manifest(PRELOADED | {"model": {"uri": "hf://org/next"}, "replicas": 3}, generation=2)
    await preload.run()
    assert preload.deployment["spec"]["template"] == before
    assert preload.deployment["spec"]["replicas"] == 3
    assert ("delete", "Job") in preload.world.cluster.calls  # the earlier one
    assert preload.says("Progressing") == ("True", "Fetching")
    preload.job("Complete")
    await preload.run()
    assert "hf://org/next" in str(preload.deployment["spec"]["template"])


async def test_a_job_that_is_deleted_later_stops_nobody():
    preload = Preload()
    await preload.run()
    preload.job("Complete")
    await preload.run()
    (job,) = preload.world.store.all(KEY, "Job")
    del preload.world.cluster.objects["Job", job["metadata"]["name"]]
    preload.world.store.remove("Job", job)
    await preload.run()
    assert preload.deployment["spec"]["replicas"] == 2
    assert ("apply", "Job") in preload.world.cluster.calls


async def test_a_job_is_never_changed():
    """Its template can't be, and a version that makes it otherwise must not fetch again."""
    preload = Preload()
    await preload.run()
    (job,) = preload.world.store.all(KEY, "Job")
    changed = copy.deepcopy(job)
    changed["spec"]["template"]["spec"]["containers"][0]["image"] = "registry/runtime:0"
    preload.world.sees("Job", changed)
    await preload.run()
    assert ("apply", "Job") not in preload.world.cluster.calls


async def test_without_jobs_pods_fetch_the_model_themselves():
    preload = Preload()
    preload.world.cluster.apis = Apis.of({"policy/v1": {"poddisruptionbudgets"}})
    await preload.run()
    assert preload.deployment["spec"]["replicas"] == 2
    assert preload.says("ChildrenApplied") == ("False", "ApiMissing")
