"""requirements.txt pins exactly what pyproject.toml asks for, and the embedded database."""

import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


def pinned() -> dict[str, Requirement]:
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    found = [Requirement(line) for line in lines if line.strip() and not line.startswith("#")]
    assert len({item.name for item in found}) == len(found)
    return {item.name.lower(): item for item in found}


def asked_for() -> dict[str, Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]["embedded"]
    return {item.name.lower(): item for item in map(Requirement, [*project["dependencies"], *extras])}


def test_every_direct_requirement_is_pinned_and_nothing_else():
    assert pinned().keys() == asked_for().keys()


def test_every_pin_is_exact_and_within_what_is_asked_for():
    wanted = asked_for()
    for name, pin in pinned().items():
        (specifier,) = pin.specifier
        assert specifier.operator == "==", pin
        assert wanted[name].specifier.contains(specifier.version, prereleases=True), (pin, wanted[name])
        assert pin.marker == wanted[name].marker, pin


def test_this_environment_has_the_pinned_versions():
    installed = {name: metadata.version(name).partition("+")[0] for name in pinned()}
    assert installed == {name: next(iter(pin.specifier)).version for name, pin in pinned().items()}
