"""The values for JupyterHub against the chart's schema, or against the facts kept of it.

The schema is not committed: 134 kB of somebody else's. Kept is what it says of the keys that our
values use. To derive that anew, with values.schema.yaml and Chart.yaml of the chart in one folder:

    python -m tests.book.hub_schema <folder>/values.schema.yaml
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from tests.book_fixtures import ROOT

VALUES = ROOT / "labs" / "hub" / "values.yaml"
FACTS = Path(__file__).with_name("hub_schema.json")
FREE = "anything below"
TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": int | float,
    "boolean": bool,
    "null": type(None),
}


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def below(schema: Mapping[str, Any], key: str) -> Mapping[str, Any] | None:
    """What the schema says of a key: {} where it takes anything, None where it knows none."""
    if key in schema.get("properties", {}):
        return dict(schema["properties"][key])
    for pattern, found in schema.get("patternProperties", {}).items():
        if re.search(pattern, key):
            return dict(found or {})
    return {} if schema.get("additionalProperties", True) else None


def closed(schema: Mapping[str, Any]) -> bool:
    """Whether the schema says which keys there are."""
    return not schema.get("additionalProperties", True)


def derive(schema: Mapping[str, Any], values: Any, at: str = "") -> dict[str, Any]:
    """path -> types, with FREE among them where the schema says nothing of what is below."""
    facts: dict[str, Any] = {}
    for key, value in values.items():
        found = below(schema, key)
        path = f"{at}.{key}".lstrip(".")
        if found is None:
            raise ValueError(f"{path}: the schema knows no such key")
        types = found.get("type", [])
        types = sorted([types] if isinstance(types, str) else types)
        inner = isinstance(value, dict) and closed(found)
        facts[path] = types if inner or not isinstance(value, dict | list) else [*types, FREE]
        if inner:
            facts |= derive(found, value, path)
    return facts


def fits(value: Any, types: list[str]) -> bool:
    """Whether a value is of one of JSON schema's types; of any where none is named."""
    named = [TYPES[one] for one in types if one != FREE]
    if isinstance(value, bool):
        return not named or bool in named
    return not named or any(isinstance(value, one) for one in named)


def problems_by_facts(values: Mapping[str, Any], facts: Mapping[str, Any]) -> Iterator[str]:
    """What the kept facts do not allow."""

    def walk(table: Mapping[str, Any], at: str) -> Iterator[str]:
        for key, value in table.items():
            path = f"{at}.{key}".lstrip(".")
            types = facts.get(path)
            if types is None:
                yield f"{path}: not among the known keys; derive {FACTS.name} anew"
            elif not fits(value, types):
                yield f"{path}: must be {' or '.join(types)}, got {value!r}"
            elif isinstance(value, dict) and FREE not in types:
                yield from walk(value, path)

    yield from walk(values, "")


def merged(defaults: Any, values: Any) -> Any:
    """The chart's own values under ours, as helm merges them."""
    if not isinstance(defaults, dict) or not isinstance(values, dict):
        return values
    return {
        key: merged(defaults.get(key), values[key]) if key in values else defaults[key]
        for key in {**defaults, **values}
    }


def problems_by_schema(values: Mapping[str, Any], schema: Path) -> Iterator[str]:
    """What the chart's schema does not allow of our values over the chart's."""
    judge = jsonschema.Draft7Validator(read(schema))
    whole = merged(read(schema.with_name("values.yaml")), values)
    for error in judge.iter_errors(whole):
        yield f"{'.'.join(map(str, error.absolute_path))}: {error.message}"


def main(schema: Path) -> None:
    """Writes the facts."""
    chart = read(schema.with_name("Chart.yaml"))
    facts = {
        "chart": {key: chart[key] for key in ("name", "version", "appVersion", "kubeVersion")},
        "keys": derive(read(schema), read(VALUES)),
    }
    FACTS.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
