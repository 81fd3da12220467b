"""The parser of every command with a configuration: `section.key=value`, files, help and suggestions.

The dataclasses are the one source: `--help` and `--print_config` show the docstring below each of their fields.
"""

import argparse
import difflib
import re
from argparse import SUPPRESS, Action
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import yaml
from jsonargparse import (
    ArgumentParser,
    DefaultHelpFormatter,
    Namespace,
    get_loader,
    set_loader,
    set_parsing_settings,
)

from adamae.common.config_fields import flatten
from adamae.common.errors import InputError
from adamae.common.yaml_io import parse_yaml, read_yaml

set_parsing_settings(docstring_parse_attribute_docstrings=True)
# jsonargparse reads YAML itself, also files that a configuration names: they get the same bounds.
set_loader("yaml", partial(parse_yaml, reader=get_loader("yaml")), (yaml.YAMLError,))


class _Formatter(DefaultHelpFormatter):
    """Shows types only where no choices are listed, and each key on a line of its own."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=8)

    def _get_type_str(self, action: Action) -> str | None:
        type_name = super()._get_type_str(action)
        return None if type_name and type_name.startswith("Literal[") else type_name


class ConfigParser(ArgumentParser):
    """Takes options (`--config FILE`) and overrides (`section.key=value`), which stand above files."""

    def __init__(self, prog: str, usage: str, description: str, settings: type) -> None:
        """Accept the fields of the dataclass `settings`, and of those in it as `section.field=value`."""
        super().__init__(
            prog=prog,
            usage=usage,
            description=description,
            formatter_class=_Formatter,
            exit_on_error=False,
        )
        self.add_argument(
            "--config",
            action="config",
            help="YAML file with any of the keys below; later files override",
        )
        self.add_class_arguments(settings)
        for action in self._actions:
            if (
                type(action).__name__ == "_ActionConfigLoad"
            ):  # a whole section from a file: possible, but not needed
                action.help = SUPPRESS

    def parse(self, arguments: list[str]) -> Namespace:
        """Return the parsed values, dataclasses instantiated; raises InputError on unknown keys and wrong types."""
        options = split_overrides(arguments)
        names = (
            option[2:].partition("=")[0].rstrip("+")
            for option in options
            if option.startswith("--")
        )
        self.require_known(name for name in names if name not in ("help", "print_config"))
        try:
            for file in _config_files(options):
                # jsonargparse would read it whole, whatever its size, and not name it
                self.require_known(flatten(read_yaml(file)), f"{file}: ")
            return self.instantiate_classes(self.parse_args(options))
        except InputError:
            raise
        except (
            Exception
        ) as error:  # jsonargparse raises its own, argparse's, YAML's and the types' errors
            sentence = f"{self.explain(' '.join(str(error).split()))}; `{self.prog} --help` lists every key"
            causes = (
                cause
                for cause in (error.__cause__, error.__context__)
                if isinstance(cause, InputError)
            )
            raise next(causes, InputError(sentence)) from error

    def explain(self, message: str) -> str:
        """Say of a value that jsonargparse refuses which type its key has; other messages stay as they are."""
        if section := re.match(r'Parser key "(\w+)": Unable to load config', message):
            return f"{section[1]} is a section: set one of its keys, {section[1]}.KEY"
        found = re.search(r'Parser key "([\w.]+)":.*(?:Got value|Given value): (.*)', message)
        types = {action.dest: getattr(action, "_typehint", None) for action in self._actions}
        if found is None or (wanted := types.get(found[1])) is None:
            return message
        name = wanted.__name__ if isinstance(wanted, type) else str(wanted).replace("typing.", "")
        return f"{found[1]} is {found[2]}: must be {name}"

    def require_known(self, keys: Iterable[str], where: str = "") -> None:
        """Raise InputError for the first key that the parser does not know, and suggest those of the same name in other
        sections, or else those spelled alike."""
        known = [action.dest for action in self._actions if action.dest not in ("help", SUPPRESS)]
        for key in keys:
            if key.replace("-", "_") not in known:
                same_name = [
                    other for other in known if other.rpartition(".")[2] == key.rpartition(".")[2]
                ]
                similar = " or ".join(
                    same_name or difflib.get_close_matches(key, known, n=2, cutoff=0.7)
                )
                suggestion = f"did you mean {similar}? " if similar else ""
                raise InputError(
                    f"{where}there is no key {key}: {suggestion}`{self.prog} --help` lists every key"
                )


def split_overrides(arguments: Iterable[str]) -> list[str]:
    """Return options, then overrides (`section.key=value`) as options; a printed configuration has comments."""
    options, overrides = [], []
    for argument in arguments:
        if re.match(r"[a-z_][\w.]*\+?=", argument):
            overrides.append(f"--{argument}")
        else:
            options.append("--print_config=comments" if argument == "--print_config" else argument)
    return options + overrides


def _config_files(options: list[str]) -> list[Path]:
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--config", type=Path, action="append", default=[])
    files: list[Path] = parser.parse_known_args(options)[0].config
    for file in files:
        if not file.is_file():
            others = {str(other) for other in file.parent.glob("*.y*ml")}
            similar = difflib.get_close_matches(str(file), others, n=1)
            suggestion = (
                f"did you mean {similar[0]}?"
                if similar
                else "give a YAML file of train.py's options"
            )
            raise InputError(f"--config {file} is no file: {suggestion}")
    return files
