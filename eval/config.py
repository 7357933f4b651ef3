"""From composed YAML to checked, frozen dataclasses: the only place that sees OmegaConf."""

import re
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from typing import Any, TypeVar, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

Config = TypeVar("Config")


def heads_as_source(arguments: list[str]) -> list[str]:
    """Let `heads=DIRECTORY` mean `source=DIRECTORY`: to Hydra, `heads=` chooses from conf/heads/."""
    return [re.sub("^heads=", "source=", argument) for argument in arguments]


def from_hydra(schema: type[Config], composed: DictConfig | dict[str, Any]) -> Config:
    """Convert `composed` to `schema`, a dataclass whose `__post_init__` checks ranges.

    Raises:
        ValueError: for an unknown key, a missing value, a wrong type or a value out of range, by name.
    """
    if missing := sorted(OmegaConf.missing_keys(composed)):  # a merge would leave the default where there is one
        raise ValueError(_without_value(missing[0]))
    try:
        checked = OmegaConf.to_object(OmegaConf.merge(_writable(schema), composed))
    except ConfigKeyError as error:
        raise ValueError(_unknown(error, schema)) from error
    except MissingMandatoryValue as error:
        raise ValueError(_without_value(error.full_key)) from error
    except OmegaConfBaseException as error:
        raise ValueError(f"setting {error.full_key}: {str(error).splitlines()[0]}") from error
    assert isinstance(checked, schema)
    return checked


def _writable(schema: type) -> DictConfig:
    """The defaults of `schema` as nodes that a merge can fill."""
    node = OmegaConf.structured(schema)
    _release(node, schema)
    return node


def _release(node: DictConfig, schema: type) -> None:
    """Frozen dataclasses become read-only nodes, at every depth; those refuse the merge that fills them."""
    OmegaConf.set_readonly(node, None)
    for name, kind in get_type_hints(schema).items():
        if isinstance(kind, type) and is_dataclass(kind):
            if OmegaConf.is_missing(node, name):
                node[name] = OmegaConf.structured(kind)
            _release(node[name], kind)


def _without_value(key: str | None) -> str:
    return f"{key} has no value; give it on the command line: {key}=..."


def _unknown(error: ConfigKeyError, schema: type) -> str:
    """Name the unknown key, the nearest known one, and all that stand beside it."""
    kind = error.object_type if is_dataclass(error.object_type) else schema
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    near = get_close_matches(str(error.full_key).rpartition(".")[2], known, 1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return f"unknown setting {error.full_key}{hint}; known there: {', '.join(known)}"
