"""What the job files use of the schemas of their kinds, as the projects give them out.

To renew it, with the files of `SOURCES` in one folder:
`python tests/crds.py FOLDER`; tests/schemas/ then holds what book/jobs/ uses.
"""

import json
import sys
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
JOBS = HERE.parent / "book" / "jobs"
KUBERAY = "https://github.com/ray-project/kuberay/blob/v1.7.0"
TRAINER = "https://github.com/kubeflow/trainer/blob/v2.3.0"
SOURCES = {
    "RayJob": f"{KUBERAY}/ray-operator/config/crd/bases/ray.io_rayjobs.yaml",
    "TrainJob": f"{TRAINER}/manifests/base/crds/trainer.kubeflow.org_trainjobs.yaml",
}
# Where a RayJob may hold what is Kubernetes' own: the rules of a NetworkPolicy.
RULES = ("spec", "rayClusterSpec", "networkPolicy", "head", "ingressRules")
KEPT = """type enum required anyOf pattern minimum maximum minLength maxLength
minItems maxItems""".split()


def documents() -> list[dict[str, Any]]:
    """Everything that the job files have Kubernetes make."""
    files = sorted(JOBS.glob("*.yaml"))
    return [each for file in files for each in yaml.safe_load_all(file.read_text())]


def read_schema(kind: str) -> dict[str, Any]:
    """What a kind's schema says of the fields that the files use; it has no others."""
    return json.loads((HERE / "schemas" / f"{kind}.json").read_text())["schema"]


def cut(schema: dict[str, Any], values: list[Any]) -> dict[str, Any]:
    """What a schema says of the fields that occur in these values."""
    part = {name: schema[name] for name in KEPT if name in schema}
    each = [value for value in values if isinstance(value, dict)]
    inner = [(name, held) for value in each for name, held in value.items()]
    if "properties" in schema:
        part["additionalProperties"] = False  # Kubernetes would warn of a field, or not
        part["properties"] = {
            name: cut(below, [held for other, held in inner if other == name])
            for name, below in schema["properties"].items()
            if name in dict(inner)
        }
    elif isinstance(schema.get("additionalProperties"), dict):
        held = [held for _, held in inner]
        part["additionalProperties"] = cut(schema["additionalProperties"], held)
    if "items" in schema:
        items = [item for value in values if isinstance(value, list) for item in value]
        part["items"] = cut(schema["items"], items)
    return part


def crd_schema(folder: Path, kind: str, version: str) -> dict[str, Any]:
    """The whole schema of a kind, from the file that its project gives out."""
    file = folder / SOURCES[kind].rpartition("/")[2]
    versions = yaml.safe_load(file.read_text())["spec"]["versions"]
    found = next(each for each in versions if each["name"] == version)
    schema = found["schema"]["openAPIV3Schema"]
    schema["properties"]["metadata"] = {"type": "object"}  # which is Kubernetes' own
    return schema


def policy_schema(ray_job: dict[str, Any]) -> dict[str, Any]:
    """A NetworkPolicy's, put together from the rules that a RayJob may hold."""
    rules = ray_job
    for name in RULES:
        rules = rules["properties"][name]
    selector = rules["items"]["properties"]["from"]["items"]["properties"]
    types = {"type": "array", "items": {"enum": ["Ingress", "Egress"]}}
    spec = {"podSelector": selector["podSelector"], "ingress": rules}
    spec = {"type": "object", "properties": spec | {"policyTypes": types}}
    top = {name: {"type": "string"} for name in ("apiVersion", "kind")}
    top |= {
        "metadata": {"type": "object"},
        "spec": spec | {"required": ["podSelector"]},
    }
    return {"type": "object", "properties": top}


def main(folder: Path) -> None:
    """Write tests/schemas/ anew."""
    made = documents()
    versions = {each["kind"]: each["apiVersion"].rpartition("/")[2] for each in made}
    whole = {kind: crd_schema(folder, kind, versions[kind]) for kind in SOURCES}
    whole["NetworkPolicy"] = policy_schema(whole["RayJob"])
    for kind, schema in whole.items():
        part = cut(schema, [each for each in made if each["kind"] == kind])
        source = SOURCES.get(kind, SOURCES["RayJob"])
        text = json.dumps({"source": source, "schema": part}, indent=1)
        (HERE / "schemas" / f"{kind}.json").write_text(text + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
