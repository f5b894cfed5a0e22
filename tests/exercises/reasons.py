"""Diagnoses in the form that a clinic asks for."""

from __future__ import annotations

from collections.abc import Mapping

from labcore.exercises import Clinic

Diagnoses = dict[str, tuple[str, str, int]]


def with_reasons(clinic: Clinic, names: Mapping[str, str]) -> Diagnoses:
    """Name, column and step of each patient: the clearest column, in the middle of the region."""
    found = {}
    for label, name in names.items():
        column, places = next(iter(clinic.telling(name).items()))
        found[label] = (name, column, places[len(places) // 2])
    return found
