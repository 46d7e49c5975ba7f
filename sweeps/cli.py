"""Small command lines of the form ``key=value``: parsed by OmegaConf, unknown keys refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from runs.validate import unknown_key


class UsageError(ValueError):
    """A command line that cannot be carried out; one sentence."""


@dataclass(frozen=True)
class Arguments:
    """``values`` (dotted keys), ``flags`` (given ones) and ``positional`` words."""

    values: dict[str, Any]
    flags: set[str]
    positional: list[str]


def parse(
    arguments: Sequence[str], *, keys: Sequence[str], flags: Sequence[str] = (), positional: int = 0
) -> Arguments:
    """Raises UsageError for a key or flag that is not listed, a value that is no YAML, and superfluous words."""
    given = {word for word in arguments if word.startswith("-")}
    for flag in given:
        if flag not in flags:
            raise UsageError(f"{flag}: unknown flag. Flags: {', '.join(flags) or 'none'}")
    words = [word for word in arguments if word not in given]
    # A path may hold a "=": what begins with a known key or has no folder before its "=" is key=value.
    pairs = [word for word in words if "=" in word and "/" not in word.partition("=")[0]]
    rest = [word for word in words if word not in pairs]
    if len(rest) > positional:
        raise UsageError(f"{rest[positional]}: not key=value. Keys: {', '.join(keys)}")
    values = {}
    for pair in pairs:
        key = pair.partition("=")[0]
        if key not in keys:
            raise UsageError(unknown_key(key, list(keys)))
        try:
            values[key] = OmegaConf.to_container(OmegaConf.from_dotlist([pair]))
        except (OmegaConfBaseException, YAMLError) as error:
            raise UsageError(f"{pair}: {str(error).splitlines()[0]}") from None
        for part in key.split("."):
            values[key] = values[key][part]  # type: ignore[index,call-overload]
    return Arguments(values, given, rest)


def as_list(value: Any) -> list[str]:
    """``key=a`` and ``key=[a,b]`` alike."""
    if value is None:
        return []
    return [str(item) for item in value] if isinstance(value, list) else [str(value)]
