"""The claims as files say them: one YAML for each paper, ``sweeps/ledger/<paper>.yaml``, read and checked.

`docs/claims.md` explains the fields and the tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from runs.validate import unknown_key

FOLDER = Path(__file__).parent
PAPER_KEYS = ("paper", "source", "note", "claims")
CLAIM_KEYS = ("id", "claim", "figure", "where", "here", "test", "command", "why", "confound")
CELL_KEYS = ("study", "mixer", "metric", "mode", "slice", "suite", "positions", "distance")
"""What picks one figure out of a report; see `sweeps.ledger.places`."""

TESTS = {
    "better": ("than",),
    "no_worse": ("than", "margin"),
    "at_least": ("value",),
    "at_most": ("value",),
    "equal_within": ("than", "margin"),
    "contrast": ("plus", "minus", "above", "below", "within"),
    "slope": ("x", "log", "sign"),
    "ratio": ("than", "field", "between"),
}
"""The kinds of tests with the keys that each has beside those of a cell."""


class ClaimError(ValueError):
    """A claim, its test or a report that does not fit them; one sentence that begins with the claim's id."""


@dataclass(frozen=True)
class Test:
    """One elementary test: its kind and its keys, the cell's own among them."""

    kind: str
    keys: dict[str, Any]

    __test__ = False  # pytest: this is no test class


@dataclass(frozen=True)
class Without:
    """The test of the same claim in a study where the confound is absent."""

    label: str
    tests: tuple[Test, ...]


@dataclass(frozen=True)
class Claim:
    """One claim. ``tests`` must all hold; none: it is not tested here, and ``command`` or ``why`` says what would."""

    paper: str
    id: str
    text: str
    figure: str  # the paper's own; "" where it gives none
    where: str
    here: str = ""  # what stands in for the paper's measurement, if it is another one
    tests: tuple[Test, ...] = ()
    command: str = ""
    why: str = ""
    confound: str = ""
    without: tuple[Without, ...] = ()

    @property
    def studies(self) -> list[str]:
        """Those that its own tests read, in their order."""
        return list(dict.fromkeys(name for test in self.tests for name in studies_of(test)))


@dataclass(frozen=True)
class Paper:
    """A paper with all its claims."""

    name: str
    source: str
    claims: list[Claim]
    note: str = ""
    file: str = field(default="", compare=False)


def studies_of(test: Test) -> list[str]:
    """Names of the studies that a test reads."""
    own = as_list(test.keys.get("study"))
    sides = [side for key in ("than", "plus", "minus") for side in as_list(test.keys.get(key))]
    other = [name for side in sides if isinstance(side, Mapping) for name in as_list(side.get("study"))]
    return list(dict.fromkeys([*map(str, own), *map(str, other)]))


def as_list(value: Any) -> list[Any]:
    """``a`` and ``[a]`` alike; nothing for None."""
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def read_papers(folder: Path = FOLDER) -> list[Paper]:
    """All papers, in the order of their files' names. Raises ClaimError."""
    files = sorted(folder.glob("*.yaml"))
    if not files:
        raise ClaimError(f"{folder}: no files of claims (*.yaml) in it")
    papers = [_paper(file) for file in files]
    seen: dict[str, str] = {}
    for paper in papers:
        for claim in paper.claims:
            if claim.id in seen:
                raise ClaimError(f"{claim.id}: the id is there twice, in {seen[claim.id]} and in {paper.file}")
            seen[claim.id] = paper.file
    return papers


def _paper(file: Path) -> Paper:
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ClaimError(f"{file}: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ClaimError(f"{file}: must be a mapping with the keys {', '.join(PAPER_KEYS)}")
    _known(content, PAPER_KEYS, str(file))
    for key in ("paper", "source", "claims"):
        if not content.get(key):
            raise ClaimError(f"{file}: {key} is missing")
    name = str(content["paper"])
    claims = [_claim(node, name, file) for node in content["claims"]]
    return Paper(name, str(content["source"]), claims, _text(content, "note"), file.name)


def _claim(node: Any, paper: str, file: Path) -> Claim:
    if not isinstance(node, dict) or not node.get("id"):
        raise ClaimError(f"{file}: a claim is a mapping with an id, not {str(node)[:60]}")
    name = str(node["id"])
    _known(node, CLAIM_KEYS, name)
    for key in ("claim", "where"):
        if not node.get(key):
            raise ClaimError(f"{name}: {key} is missing")
    confound = node.get("confound") or {}
    if not isinstance(confound, dict) or (confound and not confound.get("text")):
        raise ClaimError(f"{name}: confound={confound}: must be a mapping with a text, and without: the tests, if any")
    _known(confound, ("text", "without"), f"{name}: confound")
    without = tuple(_without(one, name) for one in as_list(confound.get("without")))
    claim = Claim(
        paper,
        name,
        _text(node, "claim"),
        _text(node, "figure"),
        _text(node, "where"),
        _text(node, "here"),
        tests(node.get("test"), name),
        _text(node, "command"),
        _text(node, "why"),
        _text(confound, "text"),
        without,
    )
    if not claim.tests and not (claim.command or claim.why):
        raise ClaimError(f"{name}: without a test it needs the command that would be one, or why: nothing would")
    return claim


def _without(node: Any, name: str) -> Without:
    if not isinstance(node, dict) or not node.get("label") or not node.get("test"):
        raise ClaimError(f"{name}: confound.without={node}: must have a label (what is removed) and a test")
    _known(node, ("label", "test"), f"{name}: confound.without")
    return Without(_text(node, "label"), tests(node["test"], name))


def tests(node: Any, name: str) -> tuple[Test, ...]:
    """``{better: {...}}``, ``{all_of: [...]}`` or nothing. Raises ClaimError."""
    if not node:
        return ()
    if not isinstance(node, dict) or len(node) != 1:
        raise ClaimError(f"{name}: test={node}: must be one of {', '.join(TESTS)}, or all_of: a list of such")
    [(kind, keys)] = node.items()
    if kind == "all_of":
        return tuple(one for part in as_list(keys) for one in tests(part, name))
    if kind not in TESTS:
        raise ClaimError(f"{name}: test.{unknown_key(str(kind), [*TESTS, 'all_of'])}")
    if not isinstance(keys, dict):
        raise ClaimError(f"{name}: test.{kind}={keys}: must be a mapping")
    _known(keys, (*CELL_KEYS, *TESTS[kind]), f"{name}: test.{kind}")
    _complete(kind, keys, f"{name}: test.{kind}")
    return (Test(kind, keys),)


def _complete(kind: str, keys: Mapping[str, Any], where: str) -> None:
    """What a kind of test cannot do without, and that its numbers are numbers."""
    needs: dict[str, Sequence[str]] = {
        "contrast": ("study", "plus", "minus"),
        "slope": ("study", "x", "sign"),
        "ratio": ("study", "mixer", "than", "field", "between"),
    }
    for key in needs.get(kind, ("study", "mixer", *TESTS[kind])):
        if keys.get(key) is None:
            raise ClaimError(f"{where}: {key} is missing")
    numbers = [(key, keys[key]) for key in ("value", "margin", "above", "below", "within") if key in keys]
    numbers += [("between", value) for value in as_list(keys.get("between"))]
    if isinstance(keys.get("x"), dict):
        numbers += [(f"x.{label}", value) for label, value in keys["x"].items()]
    for key, value in numbers:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ClaimError(f"{where}.{key}={value}: must be a number, such as 0.01")
    for key in ("margin", "within"):
        if key in keys and keys[key] <= 0:
            raise ClaimError(f"{where}.{key}={keys[key]}: must be above 0")
    if kind == "contrast" and sum(key in keys for key in ("above", "below", "within")) != 1:
        raise ClaimError(f"{where}: wants one of above, below and within")
    if kind == "slope" and keys["sign"] not in ("rising", "falling"):
        raise ClaimError(f"{where}.sign={keys['sign']}: must be rising or falling")
    if kind == "slope" and (not isinstance(keys["x"], dict) or len(set(keys["x"].values())) < 2):
        raise ClaimError(f"{where}.x={keys['x']}: must map two mixers or more to different numbers")
    if kind == "slope" and keys.get("log") and min(keys["x"].values()) <= 0:
        raise ClaimError(f"{where}.x={keys['x']}: with log: true all numbers must be above 0")
    if kind == "ratio" and (len(as_list(keys["between"])) != 2 or keys["between"][0] > keys["between"][1]):
        raise ClaimError(f"{where}.between={keys['between']}: must be two growing numbers")


def _known(node: Mapping[str, Any], keys: Sequence[str], where: str) -> None:
    for key in node:
        if key not in keys:
            raise ClaimError(f"{where}: {unknown_key(str(key), list(keys))}")


def _text(node: Mapping[str, Any], key: str) -> str:
    return " ".join(str(node.get(key) or "").split())
