"""From what Hydra composed to a checked `Config`: every problem is one sentence, before anything starts."""

from __future__ import annotations

import copy
import dataclasses
import difflib
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from hydra.errors import ConfigCompositionException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runs import schema

T = TypeVar("T")

CONF = Path(__file__).resolve().parents[1] / "conf"

_GROUPS = {
    f.name: f.default_factory
    for f in dataclasses.fields(schema.Config)
    if f.default_factory is not dataclasses.MISSING  # the groups with one fixed dataclass
}


class ConfigError(ConfigCompositionException):
    """A config that cannot be run. Hydra prints the message alone, without a traceback."""


def unknown_key(full_key: str, valid: list[str], owner: str = "") -> str:
    """The message for a key that does not exist."""
    near = difflib.get_close_matches(full_key.rsplit(".", 1)[-1], valid, 1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"{full_key}: unknown key{' of ' + owner if owner else ''}.{hint} Valid keys: {', '.join(valid)}"


def typed(cls: type[T], node: dict, path: str, owner: str) -> T:
    """``node`` as an instance of the dataclass ``cls``, key by key, so that an error can name the full key."""
    types = {f.name: f.type for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    out = OmegaConf.structured(cls)
    for key, value in node.items():
        if key not in types:
            raise ConfigError(unknown_key(_join(path, key), list(types), owner))
        try:
            OmegaConf.update(out, key, value, merge=True)
        except OmegaConfBaseException:
            raise ConfigError(
                f"{_join(path, key)}={value} ({type(value).__name__}): {owner} wants {types[key]}"
            ) from None
    missing = sorted(OmegaConf.missing_keys(out))
    if missing:
        raise ConfigError(f"{_join(path, missing[0])}: no value. {owner} needs: {', '.join(missing)}")
    instance = OmegaConf.to_object(out)
    _checked(instance, path)
    return instance  # type: ignore[return-value]


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else str(key)


def _checked(instance: Any, *path: str) -> None:
    if hasattr(instance, "check"):
        try:
            instance.check(*path)
        except ValueError as error:
            raise ConfigError(str(error)) from None


def _kind(node: Any, path: str) -> str:
    if not isinstance(node, dict) or "kind" not in node:
        raise ConfigError(f"{path}={node}: must be a group with a key 'kind'")
    return node["kind"]


def _mixer(node: Any, path: str) -> Any:
    import mixers  # the chosen mixer imports torch: only in real runs, never for --cfg job

    kind = _kind(node, path)
    try:
        cls = mixers.config_class(kind)
    except KeyError as error:
        raise ConfigError(f"{path}.kind={error.args[0]}") from None
    if isinstance(node.get("parts"), dict):  # a hybrid: each part is a mixer's config of its own
        parts = {name: _mixer(part, f"{path}.parts.{name}") for name, part in node["parts"].items()}
        return typed(cls, {**node, "parts": parts}, path, f"mixer {kind}")
    return typed(cls, node, path, f"mixer {kind}")


def _by_kind(classes: dict[str, type], node: Any, path: str) -> Any:
    kind = _kind(node, path)
    if kind not in classes:
        raise ConfigError(f"{path}.kind={kind}: must be one of {', '.join(classes)}")
    return typed(classes[kind], node, path, f"{path} {kind}")


def _resolve(cfg: DictConfig) -> dict:
    """Plain values; the model's derived widths are filled in first, since mixers interpolate them."""
    cfg = copy.deepcopy(cfg)
    OmegaConf.set_readonly(cfg, False)
    OmegaConf.set_struct(cfg, False)
    cfg.pop("hydra", None)
    try:
        if isinstance(cfg.get("model"), DictConfig):
            model = typed(schema.Model, OmegaConf.to_container(cfg.model, resolve=True), "model", "model")  # type: ignore
            try:
                model.derive("model")
            except ValueError as error:
                raise ConfigError(str(error)) from None
            cfg.model = dataclasses.asdict(model)
        return OmegaConf.to_container(cfg, resolve=True)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0]) from None


def validate(cfg: DictConfig) -> schema.Config:
    """Check all of a composed config. Raises ConfigError with one sentence: key, value, what would be right."""
    from data.config import DATA, TOKENIZERS

    plain = _resolve(cfg)
    plain.pop("experiment", None)
    known = [f.name for f in dataclasses.fields(schema.Config)]
    for key in plain:
        if key not in known:
            raise ConfigError(unknown_key(key, known))
    scalars = {k: v for k, v in plain.items() if k not in _GROUPS and k not in ("mixer", "data", "tokenizer", "study")}
    for name in ("mixer", "data", "tokenizer", *_GROUPS):
        if name not in plain:
            raise ConfigError(f"{name}: no value. Choose one, as in {name}=<name>")
    parts: dict[str, Any] = {
        "data": _by_kind(DATA, plain["data"], "data"),
        "tokenizer": _by_kind(TOKENIZERS, plain["tokenizer"], "tokenizer"),
        **{name: typed(cls, plain[name], name, name) for name, cls in _GROUPS.items()},  # type: ignore
        "mixer": _mixer(plain["mixer"], "mixer"),
    }
    root = OmegaConf.structured(schema.Config)
    types = {f.name: f.type for f in dataclasses.fields(schema.Config)}
    for key, value in scalars.items():
        try:
            root[key] = value
        except OmegaConfBaseException:
            raise ConfigError(f"{key}={value} ({type(value).__name__}): wants {types[key]}") from None
    missing = sorted(k for k in OmegaConf.missing_keys(root) if "." not in k and k not in parts)
    if missing:
        raise ConfigError(f"{missing[0]}: no value")
    config = schema.Config(**parts, **{k: root[k] for k in scalars}, study=plain.get("study"))
    _checked(config)
    if config.match != "none":
        reference(cfg, config)  # a wrong one is refused here, before anything starts
    return config


def reference(cfg: DictConfig, config: schema.Config) -> schema.Config:
    """The config whose budget ``config`` has to meet: the same but for the mixer, which is the file
    ``conf/mixer/<match_reference>.yaml`` as it stands. ``cfg`` is what Hydra composed. Raises ConfigError."""
    other = copy.deepcopy(cfg)
    OmegaConf.set_readonly(other, False)
    OmegaConf.set_struct(other, False)
    assert config.match_reference is not None
    other.mixer = mixer_node(config.match_reference)
    other.update(match="none", match_len=None)
    try:
        return validate(other)
    except ConfigError as error:
        raise ConfigError(f"match_reference={config.match_reference}: {error}") from None


@cache
def mixer_node(name: str) -> Any:
    """``conf/mixer/<name>.yaml``, its defaults put together by Hydra and its interpolations as they are."""
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.utils import create_config_search_path
    from hydra.types import RunMode

    names = sorted(path.stem for path in (CONF / "mixer").glob("*.yaml"))
    if name not in names:
        near = difflib.get_close_matches(name, names, 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"match_reference={name}: no such choice.{hint} Choices: {', '.join(names)}")
    loader = ConfigLoaderImpl(config_search_path=create_config_search_path(str(CONF)))
    return loader.load_configuration(f"mixer/{name}", [], RunMode.RUN).mixer


def data_config(name: str) -> Any:
    """The checked config of a file of `conf/data/` as it stands. Raises ConfigError where there is none."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    from data.config import DATA
    from runs.identity import ROOT

    if not (ROOT / "conf" / "data" / f"{name}.yaml").exists():
        known = sorted(path.stem for path in (ROOT / "conf" / "data").glob("*.yaml"))
        raise ConfigError(unknown_key(f"data={name}", known))
    if GlobalHydra.instance().is_initialized():
        cfg = compose("config", overrides=[f"data={name}"])
    else:
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            cfg = compose("config", overrides=[f"data={name}"])
    return _by_kind(DATA, OmegaConf.to_container(cfg.data, resolve=True), "data")


def command_line(cls: type[T], arguments: list[str]) -> T:
    """key=value arguments of a small program as its dataclass. Raises ConfigError naming the key."""
    node = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals:
            names = ", ".join(f"{f.name}=" for f in dataclasses.fields(cls))  # type: ignore[arg-type]
            raise ConfigError(f"{argument}: arguments are key=value. Keys: {names}")
        node[key] = value
    return typed(cls, node, "", "the command line")
