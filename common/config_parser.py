"""How commands with a configuration are read: `section.key=value`, help from the docstring below each key, suggestions.

The dataclasses are the one source: `--help` and `--print_config` show what stands below each of their fields.
"""

import difflib
import re
from argparse import SUPPRESS, Action
from collections.abc import Iterable
from typing import Any

from jsonargparse import ArgumentParser, DefaultHelpFormatter, set_parsing_settings

from common.errors import InputError

set_parsing_settings(docstring_parse_attribute_docstrings=True)


class _Formatter(DefaultHelpFormatter):
    """Types only where the choices do not stand there already; a key is all of its line."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=8)

    def _get_type_str(self, action: Action) -> str | None:
        type_name = super()._get_type_str(action)
        return None if type_name and type_name.startswith("Literal[") else type_name


def config_parser(prog: str, usage: str, description: str) -> ArgumentParser:
    """A parser to which classes of settings can be added; it raises argparse.ArgumentError."""
    return ArgumentParser(
        prog=prog, usage=usage, description=description, formatter_class=_Formatter, exit_on_error=False
    )


def add_settings(parser: ArgumentParser, settings: type, section: str | None = None, skip: Iterable[str] = ()) -> None:
    """Have the parser take a dataclass's fields, `section.field=value` each."""
    parser.add_class_arguments(settings, section, skip=set(skip))
    for action in parser._actions:
        if type(action).__name__ == "_ActionConfigLoad":  # a whole section from a file: possible, but no news to anyone
            action.help = SUPPRESS


def as_options(arguments: Iterable[str]) -> list[str]:
    """Overrides, `section.key=value`, as options, which stand above files; with comments where a config is printed."""
    options, overrides = [], []
    for argument in arguments:
        if re.match(r"[a-z_][\w.]*\+?=", argument):
            overrides.append(f"--{argument}")
        else:
            options.append("--print_config=comments" if argument == "--print_config" else argument)
    return options + overrides


def require_known(parser: ArgumentParser, keys: Iterable[str], where: str = "") -> None:
    """Raise InputError, with what may have been meant, for the first key that the parser does not know."""
    known = [action.dest for action in parser._actions if action.dest not in ("help", SUPPRESS)]
    for key in keys:
        if key not in known:
            near = _near(key, known)
            meant = f"did you mean {' or '.join(near)}? " if near else ""
            raise InputError(f"{where}there is no key {key}: {meant}`{parser.prog} --help` lists every key")


def _near(key: str, known: list[str]) -> list[str]:
    """What is spelt alike in the key's own section, else anywhere; the same name in another section above all."""
    section, _, name = key.rpartition(".")
    own = [other for other in known if other.rpartition(".")[0] == section]
    for others in (own, known):
        names = [other.rpartition(".")[2] for other in others]
        close = [name] if name in names else difflib.get_close_matches(name, names, n=2, cutoff=0.7)
        if close:
            return [other for other, its_name in zip(others, names, strict=True) if its_name in close]
    return []


def keys_of(options: Iterable[str]) -> list[str]:
    """The names of `--name=value` and `--name`."""
    names = (option.removeprefix("--").partition("=")[0] for option in options if option.startswith("--"))
    return [name.rstrip("+") for name in names if name not in ("help", "print_config")]


def keys_in(tree: Any, prefix: str = "") -> list[str]:
    """The dotted names of what a configuration file says."""
    if not isinstance(tree, dict):
        return []
    inner = [(f"{prefix}{key}", value) for key, value in tree.items()]
    return [name for name, value in inner if not isinstance(value, dict) or not value] + [
        found for name, value in inner for found in keys_in(value, f"{name}.")
    ]
