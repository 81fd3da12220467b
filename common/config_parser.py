"""The parser of commands with a configuration: `section.key=value`, files, help and suggestions.

The dataclasses are the one source: `--help` and `--print_config` show the docstring below each of
their fields.
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
from adamae.common.locations import local_path
from adamae.common.yaml_io import parse_yaml, read_yaml

set_parsing_settings(docstring_parse_attribute_docstrings=True)
# jsonargparse reads YAML itself, also files that a configuration names: they get the same bounds.
set_loader("yaml", partial(parse_yaml, reader=get_loader("yaml")), (yaml.YAMLError,))


class _Formatter(DefaultHelpFormatter):
    """Help with each key on a line of its own, and with types only where no choices are listed."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=8)

    def _get_type_str(self, action: Action) -> str | None:
        type_name = super()._get_type_str(action)
        if type_name is not None and type_name.startswith("Literal["):
            return None
        return type_name


class ConfigParser(ArgumentParser):
    """A parser of options (`--config FILE`) and of overrides of files (`section.key=value`)."""

    def __init__(self, prog: str, usage: str, description: str, settings: type) -> None:
        """Accept the fields of the dataclass `settings`, nested ones as `section.field`."""
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
            # jsonargparse also takes a file for each section, which nobody needs to know.
            if type(action).__name__ == "_ActionConfigLoad":
                action.help = SUPPRESS
            # A docstring may have several lines. --help wraps its words again, and YAML has one.
            elif action.help is not None:
                action.help = " ".join(action.help.split())

    def parse(self, arguments: list[str]) -> Namespace:
        """Return the parsed values, with instances of the dataclasses.

        Raise InputError for an unknown key or a value of another type or out of range.
        """
        options = split_overrides(arguments)
        keys = []
        for option in options:
            key = option.removeprefix("--").partition("=")[0].rstrip("+")
            if option.startswith("--") and key not in ("help", "print_config"):
                keys.append(key)
        self.require_keys(keys)
        try:
            # jsonargparse would read files whole, whatever their size, and name them in no message.
            for file in _list_config_files(options):
                self.require_keys(flatten(read_yaml(file)), f"{file}: ")
            return self.instantiate_classes(self.parse_args(options))
        except InputError:
            raise
        # jsonargparse raises errors of its own, of argparse, of PyYAML and of the types.
        except Exception as error:
            # It wraps those of the dataclasses, whose sentences are better than its own.
            for cause in (error.__cause__, error.__context__):
                if isinstance(cause, InputError):
                    raise cause from error
            message = self.explain(" ".join(str(error).split()))
            raise InputError(f"{message}; `{self.prog} --help` lists every key") from error

    def explain(self, message: str) -> str:
        """Return jsonargparse's message, or one with the type of the key whose value it refuses."""
        section = re.match(r'Parser key "(\w+)": Unable to load config', message)
        if section is not None:
            return f"{section[1]} is a section: set one of its keys, {section[1]}.KEY"
        refusal = re.search(r'Parser key "([\w.]+)":.*(?:Got value|Given value): (.*)', message)
        if refusal is None:
            return message
        key, value = refusal.groups()
        types = {action.dest: getattr(action, "_typehint", None) for action in self._actions}
        key_type = types.get(key)
        if key_type is None:
            return message
        name = str(key_type).replace("typing.", "")
        if isinstance(key_type, type):
            name = key_type.__name__
        return f"{key} is {value}: must be {name}"

    def require_keys(self, keys: Iterable[str], source: str = "") -> None:
        """Raise InputError for the first key that does not exist.

        Suggest keys of the same name in other sections, or else those that are spelled alike.
        """
        all_keys = [action.dest for action in self._actions]
        all_keys = [key for key in all_keys if key not in ("help", SUPPRESS)]
        for key in keys:
            if key.replace("-", "_") in all_keys:
                continue
            name = key.rpartition(".")[2]
            similar = [candidate for candidate in all_keys if candidate.rpartition(".")[2] == name]
            if not similar:
                similar = difflib.get_close_matches(key, all_keys, n=2, cutoff=0.7)
            suggestion = f"did you mean {' or '.join(similar)}? " if similar else ""
            advice = f"{suggestion}`{self.prog} --help` lists every key"
            raise InputError(f"{source}there is no key {key}: {advice}")


def split_overrides(arguments: Iterable[str]) -> list[str]:
    """Return the options, then the overrides as options: `data.fps=8` becomes `--data.fps=8`.

    `--print_config` prints comments, too.
    """
    options = []
    overrides = []
    for argument in arguments:
        if re.match(r"[a-z_][\w.]*\+?=", argument):
            overrides.append(f"--{argument}")
        elif argument == "--print_config":
            options.append("--print_config=comments")
        else:
            options.append(argument)
    return options + overrides


def _list_config_files(options: list[str]) -> list[Path]:
    """Return the files of --config; raise InputError for one that does not exist."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--config", type=local_path, action="append", default=[])
    files: list[Path] = parser.parse_known_args(options)[0].config
    for file in files:
        if not file.is_file():
            neighbors = map(str, file.parent.glob("*.y*ml"))
            similar = difflib.get_close_matches(str(file), list(neighbors), n=1)
            suggestion = "give a YAML file of train.py's options"
            if similar:
                suggestion = f"did you mean {similar[0]}?"
            raise InputError(f"--config {file} is no file: {suggestion}")
    return files
