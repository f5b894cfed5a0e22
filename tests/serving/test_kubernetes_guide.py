"""The manifests of the guide: each parses, and names, ports, times and options agree."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from labcore.serving.engine.metrics import Snapshot
from labcore.serving.remote import process
from labcore.serving.remote.ipc import Listener
from labcore.serving.triton import repository
from labcore.serving.triton.repository import write_repository
from tests.serving.standin import StandIn
from tests.serving.triton import ENVIRONMENT, need_server

GUIDE = Path(__file__).resolve().parents[2] / "book" / "serving_kubernetes.md"
# kind: its API and the fields that its spec must have.
KINDS = {
    "Deployment": ("apps/v1", {"replicas", "selector", "template"}),
    "Service": ("v1", {"selector", "ports"}),
    "PodMonitor": ("monitoring.coreos.com/v1", {"selector", "podMetricsEndpoints"}),
    "ConfigMap": ("v1", set()),
    "HorizontalPodAutoscaler": (
        "autoscaling/v2",
        {"scaleTargetRef", "minReplicas", "maxReplicas", "metrics"},
    ),
    "PodDisruptionBudget": ("policy/v1", {"selector", "maxUnavailable"}),
}


def manifests() -> dict[str, Any]:
    """By kind and name."""
    blocks = re.findall(r"^```yaml\n(.*?)^```$", GUIDE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    found = [one for block in blocks for one in yaml.safe_load_all(block)]
    return {f"{one['kind']}/{one['metadata']['name']}": one for one in found}


def option(args: list[str], name: str) -> str:
    return next(arg.split("=", 1)[1] for arg in args if arg.startswith(f"--{name}="))


def problems(all_: dict[str, Any]) -> list[str]:
    """What does not agree, a line each."""
    found: list[str] = []

    def must(holds: bool, what: str) -> None:
        if not holds:
            found.append(what)

    for name, one in all_.items():
        api, fields = KINDS[one["kind"]]
        must(one["apiVersion"] == api, f"{name}: apiVersion")
        must(fields <= one.get("spec", {}).keys(), f"{name}: fields")
    deployment = all_["Deployment/lm"]
    pod = deployment["spec"]["template"]["spec"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    containers = {one["name"]: one for one in [*pod["initContainers"], *pod["containers"]]}
    server, engine = containers["server"], containers["engine"]

    for name, one in all_.items():
        chosen = one.get("spec", {}).get("selector")
        if chosen is not None:
            must(chosen.get("matchLabels", chosen) == labels, f"{name}: selector")
    ports = {port["name"]: port["containerPort"] for port in server["ports"]}
    for name, port in ports.items():
        must(option(server["args"], f"{name}-port") == str(port), f"{name}: port of the server")
    for name in ("Service/lm", "Service/lm-grpc"):
        for port in all_[name]["spec"]["ports"]:
            must(ports.get(port["targetPort"]) == port["port"], f"{name}: {port['name']}")
    must(all_["Service/lm-grpc"]["spec"].get("clusterIP") == "None", "lm-grpc: headless")
    monitor = all_["PodMonitor/lm"]["spec"]["podMetricsEndpoints"][0]
    must(monitor["port"] in ports, "PodMonitor: port")
    for kind, path in (("startup", "ready"), ("readiness", "ready"), ("liveness", "live")):
        asked = server[f"{kind}Probe"]["httpGet"]
        must(asked == {"path": f"/v2/health/{path}", "port": "http"}, f"server: {kind}")
        must(f"{kind}Probe" in engine, f"engine: {kind}")

    volumes = {one["name"]: one for one in pod["volumes"]}
    mounts = {
        name: {mount["name"]: mount["mountPath"] for mount in one["volumeMounts"]}
        for name, one in containers.items()
    }
    used = {volume for one in mounts.values() for volume in one}
    must(used == set(volumes), "volumes")
    shared = {one["shared"] for one in mounts.values()}
    must(len(shared) == 1, "shared: one path")
    must(mounts["server"].get("shm") == "/dev/shm", "shm: path")
    must(volumes["shm"]["emptyDir"].get("medium") == "Memory", "shm: memory")
    must("sizeLimit" in volumes["shm"]["emptyDir"], "shm: size")
    must(engine.get("restartPolicy") == "Always", "engine: outlives the server")
    must(engine["resources"]["limits"].get("nvidia.com/gpu", 0) >= 1, "engine: GPU")
    for one in containers.values():
        tag = one["image"].rpartition(":")[2]
        must("/" not in tag and tag != "latest", f"{one['name']}: version")

    grace = pod["terminationGracePeriodSeconds"]
    leaving = int(server["lifecycle"]["preStop"]["exec"]["command"][1])
    exiting = int(option(server["args"], "exit-timeout-secs"))
    longest = int(deployment["metadata"]["annotations"]["labcore/longest-stream-seconds"])
    must(grace > leaving + exiting, "grace: preStop and the exit timeout fit")
    must(exiting > longest, "exit timeout: the longest stream fits")
    age_grace = int(option(server["args"], "grpc-max-connection-age-grace"))
    must(age_grace > longest * 1000, "connection age: the longest stream fits")

    scaler = all_["HorizontalPodAutoscaler/lm"]["spec"]
    target = scaler["scaleTargetRef"]
    must(f"{target['kind']}/{target['name']}" in all_, "HPA: target")
    must(scaler["minReplicas"] <= deployment["spec"]["replicas"], "HPA: replicas")
    must(scaler["maxReplicas"] > scaler["minReplicas"], "HPA: room")
    rules = yaml.safe_load(all_["ConfigMap/prometheus-adapter"]["data"]["config.yaml"])["rules"]
    metrics = {rule["name"]["as"]: rule["seriesQuery"] for rule in rules}
    for metric in scaler["metrics"]:
        must(metric["pods"]["metric"]["name"] in metrics, "HPA: metric")
    series = re.match(r'(\w+){value="(\w+)"', next(iter(metrics.values())))
    model = (Path(repository.__file__).parent / "files" / "model.py").read_text("utf-8")
    must(series is not None and f'name="{series[1]}"' in model, "adapter: series")
    must(series is not None and series[2] in Snapshot.__dataclass_fields__, "adapter: value")
    waiting = int(engine["args"][engine["args"].index("--max-waiting") + 1])
    must(int(scaler["metrics"][0]["pods"]["target"]["averageValue"]) < waiting, "HPA: queue")
    budget = all_["PodDisruptionBudget/lm"]["spec"]["maxUnavailable"]
    must(budget < scaler["minReplicas"], "PDB: one stays")
    return found


def test_the_manifests_agree() -> None:
    found = manifests()
    assert len(found) == 7
    assert problems(found) == []


def pod_of(all_: dict[str, Any]) -> Any:
    return all_["Deployment/lm"]["spec"]["template"]["spec"]


def server_of(all_: dict[str, Any]) -> Any:
    return pod_of(all_)["containers"][0]


def engine_of(all_: dict[str, Any]) -> Any:
    return pod_of(all_)["initContainers"][1]


PLANTS: list[tuple[str, Callable[[Any], Any]]] = [
    ("grace", lambda a: pod_of(a).update(terminationGracePeriodSeconds=130)),
    ("exit timeout", lambda a: server_of(a)["args"].__setitem__(-1, "--exit-timeout-secs=90")),
    ("http: port of", lambda a: server_of(a)["ports"][0].update(containerPort=8080)),
    ("Service/lm-grpc: grpc", lambda a: a["Service/lm-grpc"]["spec"]["ports"][0].update(port=9)),
    ("headless", lambda a: a["Service/lm-grpc"]["spec"].pop("clusterIP")),
    ("selector", lambda a: a["Service/lm"]["spec"].update(selector={"app": "ml"})),
    ("server: liveness", lambda a: server_of(a)["livenessProbe"]["httpGet"].update(path="/")),
    ("engine: startup", lambda a: engine_of(a).pop("startupProbe")),
    ("outlives", lambda a: engine_of(a).pop("restartPolicy")),
    ("version", lambda a: server_of(a).update(image="nvcr.io/nvidia/tritonserver")),
    ("volumes", lambda a: pod_of(a)["volumes"].pop()),
    ("shm: memory", lambda a: pod_of(a)["volumes"][1]["emptyDir"].pop("medium")),
    ("HPA: metric", lambda a: a["HorizontalPodAutoscaler/lm"]["spec"]["metrics"][0]["pods"][
        "metric"].update(name="cpu")),
    ("HPA: target", lambda a: a["HorizontalPodAutoscaler/lm"]["spec"]["scaleTargetRef"].update(
        name="llm")),
    ("fields", lambda a: a["PodDisruptionBudget/lm"].update(spec={"maxUnavailable": 1})),
]  # fmt: skip


@pytest.mark.parametrize(("words", "plant"), PLANTS, ids=[words for words, _ in PLANTS])
def test_what_does_not_agree_is_found(words: str, plant: Callable[[Any], Any]) -> None:
    wrong = copy.deepcopy(manifests())
    plant(wrong)
    assert any(words in line for line in problems(wrong)), problems(wrong)


def test_engine_options_parse_and_its_socket_is_the_repositorys(
    tmp_path: Path,
) -> None:
    found = manifests()
    engine, writer = engine_of(found), pod_of(found)["initContainers"][0]
    assert engine["command"] == ["python", "-m", "labcore.serving.remote.process"]
    told = process._parser().parse_args(engine["args"])
    assert writer["args"][:2] == ["write", "--folder"]
    folder = Path(writer["args"][2])
    assert told.socket == str(folder / "engine")  # as `write` names it in config.pbtxt
    assert told.model.startswith(engine["volumeMounts"][1]["mountPath"])
    write_repository(tmp_path / "models", socket=told.socket)
    models = f"--model-repository={folder / 'models'}"
    assert models in server_of(found)["args"] and folder == Path(
        writer["volumeMounts"][0]["mountPath"]
    )


def test_the_engines_probe_passes_for_a_healthy_engine_alone(tmp_path: Path) -> None:
    engine = engine_of(manifests())
    _, flag, code = engine["startupProbe"]["exec"]["command"]
    assert engine["livenessProbe"]["exec"] == engine["startupProbe"]["exec"]

    class Sick(StandIn):
        def health(self) -> dict[str, Any]:
            raise RuntimeError("planted")

    def probe(path: Path) -> int:
        here = code.replace("/run/labcore/engine", str(path))
        assert here != code
        return subprocess.run([sys.executable, flag, here], stderr=subprocess.DEVNULL).returncode

    assert probe(tmp_path / "a") != 0  # nobody listens
    with Listener(StandIn(), tmp_path / "a"):
        assert probe(tmp_path / "a") == 0
    with Listener(Sick(), tmp_path / "b"):
        assert probe(tmp_path / "b") != 0


def test_every_option_of_the_server_is_one_of_its_own() -> None:
    need_server()
    from labcore.serving.triton import environment as triton_environment

    installed = triton_environment.load(ENVIRONMENT)
    told = subprocess.run(
        [str(installed.binary), "--help"],
        capture_output=True,
        text=True,
        env=installed.variables({}),
    )
    known = set(re.findall(r"^  --([a-z0-9-]+)", told.stdout + told.stderr, re.MULTILINE))
    for arg in server_of(manifests())["args"]:
        assert arg.removeprefix("--").partition("=")[0] in known, arg
    assert installed.version and "24.10" in server_of(manifests())["image"]


def test_the_guide_never_says_triton_for_the_server_alone() -> None:
    """Triton alone is the language of the kernels."""
    prose = re.sub(r"^```.*?^```$", "", GUIDE.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert not re.findall(r"\bTriton\b(?! Inference Server)", prose)
    assert 800 < len(prose.split()) < 1500
