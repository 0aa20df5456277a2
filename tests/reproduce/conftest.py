"""A small definition on the digits, which needs no data file."""

from typing import Any

import pytest

from priory.reproduce import definition


@pytest.fixture
def table() -> dict[str, Any]:
    """What a TOML file would hold."""
    return {
        "paper": "Nobody, Nowhere, 2026",
        "title": "Table 0: digits",
        "seeds": 2,
        "reduced": "Everything.",
        "columns": {"personal": "personal.clients.mean", "NLL": {"at": "personal.nll", "lower": True}},
        "data": {"data": "digits", "partition": "iid", "clients": 5},  # with these settings one program does for all
        "run": {"rounds": 2, "model": "linear"},
        "method": {"step_size": 0.1},
        "block": [
            {"key": "one", "title": "large steps"},
            {"key": "two", "title": "small steps", "method": {"step_size": 0.01}},
        ],
        "row": [
            {"key": "avg", "label": "FedAvg", "method": "fedavg", "published": {"one": {"personal": [99.9, 0.1]}}},
            {"key": "prox", "label": "FedProx", "method": "fedprox", "set": {"mu": 1}, "blocks": ["one"]},
        ],
        "quick": {"seeds": 1, "run": {"rounds": 1}, "blocks": ["one"]},
    }


@pytest.fixture
def tiny(table, monkeypatch) -> definition.Definition:
    """That definition, which every command then finds under the name `digits-table-0`."""
    read = definition.read

    def found(name: str, quick: bool = False, seeds: int | None = None) -> definition.Definition:
        if name != "digits-table-0":
            return read(name, quick, seeds)
        return definition.parse(name, table, table["quick"] if quick else None, seeds)

    for module in ("priory.reproduce", "priory.reproduce.definition"):
        monkeypatch.setattr(f"{module}.read", found)
        monkeypatch.setattr(f"{module}.names", lambda: ["digits-table-0"])
    return found("digits-table-0")
