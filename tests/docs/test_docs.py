"""The commands and the example of README and docs work as they stand there.

Every command block says what it is: ``bash run`` is executed in a copy of the project, ``bash compose`` is composed and
validated (a full-size job) or dry-run (a make target), ``bash example`` belongs to the guide's own mixer.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(.*?)\n(.*?)^```$", re.M | re.S)
KINDS = ("run", "compose", "example")


def blocks() -> list[tuple[str, str, str]]:
    """(page, info string, text) of every fenced block."""
    return [(page.name, info.strip(), text) for page in PAGES for info, text in FENCE.findall(page.read_text())]


def commands(kind: str) -> list[tuple[str, str]]:
    """(page, command line) of every command block of a kind; a backslash joins lines, comments are dropped."""
    out = []
    for page, info, text in blocks():
        if info.split() == ["bash", kind]:
            lines = text.replace("\\\n", " ").splitlines()
            out += [(page, line.split("  #")[0].strip()) for line in lines if line.strip() and line[0] != "#"]
    return out


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """The project as a fresh clone would have it, with this environment's programs and the prepared data."""
    target = tmp_path_factory.mktemp("clone")
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    (ROOT / ".cache").mkdir(exist_ok=True)
    (target / ".cache").symlink_to(ROOT / ".cache")
    return target


def environment(folder: Path) -> dict[str, str]:
    """`python` is the one that runs these tests, and the copy's modules come before an installed project's."""
    return os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(folder),
        "WANDB_MODE": "offline",
    }


def execute(line: str, folder: Path, **changes: str) -> str:
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=folder,
        env=environment(folder) | changes,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def test_every_command_block_says_what_it_is():
    for page, info, text in blocks():
        looks = re.search(r"^\s*(python|make|pip|bash|source|\./)", text, re.M)
        if looks and not info.startswith(("python", "yaml")):
            assert info.split()[:1] == ["bash"] and info.split()[1:2] and info.split()[1] in KINDS, f"{page}: {text}"


@pytest.mark.parametrize("page, line", commands("compose"))
def test_composes(page, line, copy):
    words = shlex.split(line)
    if words[0] == "make":
        assert "python" in execute(f"make -n {' '.join(words[1:])}", copy)
        return
    assert words[:2] == ["python", "train.py"], f"{page}: only train.py and make can be composed: {line}"
    overrides = [word for word in words[2:] if word != "-m"]
    program = (
        "import sys; from itertools import product\n"
        "from hydra import compose, initialize_config_dir\n"
        "from runs.validate import validate\n"
        "with initialize_config_dir(sys.argv[1] + '/conf', version_base='1.3'):\n"
        "    choices = [[f'{o.partition(\"=\")[0]}={v}' for v in o.partition('=')[2].split(',')]"
        " if '[' not in o else [o] for o in sys.argv[2:]]\n"
        "    for job in product(*choices): validate(compose('config', overrides=list(job)))\n"
    )
    execute(shlex.join(["python", "-c", program, str(copy), *overrides]), copy)


@pytest.mark.slow
@pytest.mark.parametrize("page, line", commands("run"))
def test_runs(page, line, copy):
    execute(line, copy)


@pytest.mark.slow
def test_the_guides_mixer_passes_the_contract_and_trains(copy):
    files = {}
    for page, info, text in blocks():
        named = re.search(r"file=(\S+)", info)
        if named and page == "add_a_mixer.md":
            files[named[1]] = text
    assert set(files) == {"mixers/ema.py", "conf/mixer/ema.yaml"}
    for name, text in files.items():
        (copy / name).write_text(text)
    (suite, training) = [line for _, line in commands("example")]
    assert re.search(r"\d+ passed", execute(f"{suite} -p no:cacheprovider", copy))
    out = execute(f"{training} logger=none evaluation.test_tokens=5000 evaluation.val_tokens=5000", copy)
    assert "test/bits_per_byte" in out
    for name in files:
        (copy / name).unlink()
