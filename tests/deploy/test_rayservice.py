"""The RayService: fields that KubeRay has, a config that Ray Serve has, arguments that the application knows."""

import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from saguaro.cluster.args import ClusterArgs
from saguaro.cluster.settings import resources_of
from tests.deploy.test_container import ROOT, serve_help

MANIFEST = ROOT / "deploy" / "rayservice.yaml"
IMAGE = ROOT / "deploy" / "Containerfile.ray"
DOCUMENT = ROOT / "docs" / "ray.md"

# The fields of KubeRay's API ray.io/v1 that there have been since its first version, and those that are required.
SERVICE = ({"serveConfigV2", "rayClusterConfig", "serveService"}, {"serveConfigV2", "rayClusterConfig"})
CLUSTER = (
    {"rayVersion", "headGroupSpec", "workerGroupSpecs", "enableInTreeAutoscaling", "autoscalerOptions"},
    {"headGroupSpec"},
)
HEAD = ({"serviceType", "headService", "enableIngress", "rayStartParams", "template"}, {"rayStartParams", "template"})
WORKERS = (
    {"groupName", "replicas", "minReplicas", "maxReplicas", "numOfHosts", "rayStartParams", "template"},
    {"groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"},
)

SCHEMA = """
import json, sys
from pydantic import BaseModel
from ray.serve.schema import ServeDeploySchema

def check(given, model):
    assert set(given) <= set(type(model).model_fields), (set(given), type(model))
    for name, value in given.items():
        one = getattr(model, name)
        if isinstance(one, BaseModel):
            check(value, one)
        elif isinstance(one, list) and one and isinstance(one[0], BaseModel):
            for left, right in zip(value, one, strict=True):
                check(left, right)

for given in json.load(sys.stdin):
    check(given, ServeDeploySchema.model_validate(given))
"""


def manifest() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(MANIFEST.read_text())
    return found


def configs() -> list[dict[str, Any]]:
    """Configs of Ray Serve: the manifest's, and that of the document."""
    (block,) = re.findall(r"```yaml\n(# serve deploy.*?)```", DOCUMENT.read_text(), re.DOTALL)
    return [yaml.safe_load(manifest()["spec"]["serveConfigV2"]), yaml.safe_load(block)]


def arguments(config: dict[str, Any]) -> ClusterArgs:
    (app,) = config["applications"]
    assert (app["import_path"], app["route_prefix"]) == ("saguaro.cluster:app", "/")
    return ClusterArgs.model_validate(app["args"])


def has(fields: dict[str, Any], known: tuple[set[str], set[str]]) -> None:
    allowed, required = known
    assert required <= set(fields) <= allowed, set(fields)


def test_its_fields_are_kuberays() -> None:
    found = manifest()
    assert (found["apiVersion"], found["kind"]) == ("ray.io/v1", "RayService")
    cluster = found["spec"]["rayClusterConfig"]
    has(found["spec"], SERVICE)
    has(cluster, CLUSTER)
    has(cluster["headGroupSpec"], HEAD)
    for workers in cluster["workerGroupSpecs"]:
        has(workers, WORKERS)
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())


@pytest.mark.ray
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the extra ray")
def test_its_config_is_ray_serves() -> None:
    """Ray Serve ignores fields that it does not know, so their names are compared too."""
    command = [sys.executable, "-c", SCHEMA]
    done = subprocess.run(command, input=json.dumps(configs()), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("config", configs(), ids=["manifest", "document"])
def test_the_application_knows_its_arguments(config: dict[str, Any]) -> None:
    args = arguments(config)
    assert (args.cluster.least, args.cluster.most) == (1, 4)
    known = serve_help()
    for name in config["applications"][0]["args"]:
        assert re.search(rf"--{name.replace('_', '-')}\b", known), name


def test_a_replica_fits_on_a_worker_and_drains_in_time() -> None:
    args = arguments(configs()[0])
    cluster = manifest()["spec"]["rayClusterConfig"]
    (workers,) = cluster["workerGroupSpecs"]
    pod = workers["template"]["spec"]
    taken = resources_of(args.replica.engine, has_gpus=False)
    assert taken.cpus == int(pod["containers"][0]["resources"]["limits"]["cpu"])
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert (workers["minReplicas"], workers["maxReplicas"]) == (args.cluster.least, args.cluster.most)
    assert pod["terminationGracePeriodSeconds"] > args.replica.server.limits.drain_seconds


def test_every_pod_has_the_key_and_the_image() -> None:
    cluster = manifest()["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        (container,) = group["template"]["spec"]["containers"]
        assert container["image"] == "saguaro:ray"
        keys = [one["valueFrom"]["secretKeyRef"] for one in container["env"] if one["name"] == "SAGUARO_API_KEY"]
        assert keys == [{"name": "saguaro", "key": "api-key"}]


def test_the_image_has_the_version_of_ray_that_the_package_wants() -> None:
    (version,) = re.findall(r'ARG RAY="ray\[serve\]==([\d.]+)"', IMAGE.read_text())
    assert manifest()["spec"]["rayClusterConfig"]["rayVersion"] == version
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (wanted,) = project["optional-dependencies"]["ray"]
    least, most = re.findall(r"[\d.]+", wanted)
    numbers = [tuple(map(int, each.split("."))) for each in (least, version, most)]
    assert numbers == sorted(numbers)


def test_the_documents_flags_are_known() -> None:
    known = serve_help()
    commands = re.findall(r"^saguaro serve .*$|`saguaro serve .*?`", DOCUMENT.read_text(), re.MULTILINE)
    assert len(commands) >= 2
    for flag in re.findall(r"--[a-z-]+", " ".join(commands)):
        assert re.search(rf"{flag}\b", known), flag
