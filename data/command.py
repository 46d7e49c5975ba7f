"""python -m data.prepare data=NAME tokenizer=NAME: fetches, shuffles and tokenizes a corpus, once.

The words are those of train.py: data=, tokenizer=, data.KEY=, tokenizer.KEY= and paths.cache=. Beside them
    processes=N        units of text and buckets of tokens are worked on N at a time (default 1)
    streaming=false    download a hub data set whole, into the cache of ``datasets``, before reading it
    progress=false     no bar

After a kill, a full disk or a lost connection the same command goes on from what is done. Exit code: 0 done, 1 an error,
which one sentence explains.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from data.config import DATA, TOKENIZERS
from data.prepare import MANIFEST, prepare
from runs.cli import explain
from runs.validate import ConfigError, command_line, typed

log = logging.getLogger(__name__)

CONF = Path(__file__).resolve().parents[1] / "conf"
GROUPS = ("data", "tokenizer", "paths")


@dataclass
class Options:
    """What says how, not what."""

    processes: int = 1
    streaming: bool = True
    progress: bool = True

    def check(self, path: str) -> None:
        """Raises ValueError."""
        if self.processes < 1:
            raise ValueError(f"processes={self.processes}: must be at least 1")


def parse(arguments: Sequence[str]) -> tuple[Any, Any, Path, Options]:
    """The command line as checked configs of data and tokenizer, the cache, and options.

    Raises what Hydra raises, and ConfigError with one sentence.
    """
    how = [word for word in arguments if word.partition("=")[0] in Options.__dataclass_fields__]
    what = [word for word in arguments if word not in how]
    for word in what:
        key, equals, _ = word.lstrip("+").partition("=")
        if not equals or key.split(".")[0] not in GROUPS:
            keys = ", ".join([*(f"{group}=" for group in GROUPS[:2]), *(f"{name}=" for name in vars(Options()))])
            raise ConfigError(f"{word}: must be one of {keys}, data.KEY=, tokenizer.KEY= or paths.cache=")
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("config", overrides=what)
    plain = {group: OmegaConf.to_container(cfg[group], resolve=True) for group in GROUPS}
    made: list[Any] = []
    for group, classes in (("data", DATA), ("tokenizer", TOKENIZERS)):
        node = plain[group]
        assert isinstance(node, dict)
        made.append(typed(classes[node["kind"]], node, group, f"{group} {node['kind']}"))
    if made[0].kind != "corpus":
        raise ConfigError(
            f"data.kind={made[0].kind}: only a corpus is prepared; this kind makes its data as it is read"
        )
    return made[0], made[1], Path(plain["paths"]["cache"]), command_line(Options, how)  # type: ignore[index,call-overload]


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code."""
    if {"-h", "--help"} & set(arguments):
        sys.stdout.write(f"{__doc__}\n")
        return 0
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    begun = time.monotonic()
    try:
        data_cfg, tokenizer_cfg, cache, options = parse(arguments)
        folder = prepare(
            data_cfg,
            tokenizer_cfg,
            cache,
            fetch=True,
            streaming=options.streaming,
            processes=options.processes,
            progress=options.progress,
        )
    except (HydraException, OmegaConfBaseException) as error:
        sys.stderr.write(f"{explain(error)}\n")
        return 1
    except (ValueError, OSError, RuntimeError) as error:
        plain = error.strerror if isinstance(error, OSError) and error.filename is None else None
        sys.stderr.write(f"{plain or error}\n")
        return 1
    counts = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["splits"]
    words = ", ".join(
        f"{split} {n['documents']:,} documents {n['tokens']:,} tokens {n['bytes']:,} bytes"
        for split, n in counts.items()
    )
    sys.stdout.write(f"{folder}: {words}; {time.monotonic() - begun:.1f} s\n")
    return 0
