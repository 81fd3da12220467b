"""Help, suggestions and printed configurations all say what stands below each field."""

import re
from dataclasses import dataclass

import pytest
import yaml

import preview
from common.config_parser import ConfigParser, dotted_keys, split_overrides
from common.errors import InputError
from training import config


@dataclass
class Colour:
    """What is painted."""

    shade: str = "red"
    """as a painter calls it"""
    depth: int = 3
    """coats of it"""


@pytest.fixture
def parser():
    parser = ConfigParser("paint.py", "paint.py [key=value ...]", "Paint.")
    parser.add_settings(Colour, "colour")
    return parser


def test_help_is_what_stands_below_the_field(parser):
    text = " ".join(parser.format_help().split())
    assert "What is painted" in text
    assert "as a painter calls it (type: str, default: red)" in text
    assert "Path to a configuration file" not in text  # of every section


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("shade", "colour.shade"),
        ("color.shade", "colour.shade"),
        ("colour.dept", "colour.depth"),
        ("dept", "colour.depth"),
    ],
)
def test_an_unknown_key_gets_what_may_have_been_meant(parser, key, meant):
    with pytest.raises(InputError, match=rf"^there is no key {key}: did you mean {meant}\? `paint.py --help`"):
        parser.require_known([key])


def test_nothing_is_suggested_for_what_is_like_nothing(parser):
    with pytest.raises(InputError, match=r"^x.yaml: there is no key quux: `paint.py --help` lists every key$"):
        parser.require_known(["quux"], "x.yaml: ")


def test_overrides_stand_behind_options_and_may_add_to_lists():
    assert split_overrides(["a.b=1", "--config", "f", "c+=2"]) == ["--config", "f", "--a.b=1", "--c+=2"]


def test_keys_in_a_file():
    assert sorted(dotted_keys({"a": 1, "b": {"c": 2, "d": {}}})) == ["a", "b.c", "b.d"]


def test_every_key_of_a_run_is_explained(capsys):
    for action in config._parser()._actions:
        assert action.help, f"{action.dest} has no docstring below it"
    with pytest.raises(SystemExit) as ended:
        config.parse(["--help"])
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--model.mask_ratio MASK_RATIO fraction of the tokens that are masked; Table 1 (b) (type: float" in text
    assert text.index("One run") < text.index("Where clips come from") < text.index("Architecture and objective")


def test_the_preview_explains_the_same_keys(capsys):
    with pytest.raises(SystemExit):
        preview.parse_arguments(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "random horizontal flip" in text
    assert preview.parse_arguments(["shards", "data.flip=false", "--num-clips", "2"]).data.flip is False
    with pytest.raises(InputError, match=r"no key data\.flop: did you mean data\.flip"):
        preview.parse_arguments(["shards", "data.flop=false"])
    with pytest.raises(InputError, match=r"num.clips"):
        preview.parse_arguments(["shards", "--num-clips", "many"])


def test_keys_of_files_and_of_the_command_line_are_both_checked(tmp_path):
    file = tmp_path / "x.yaml"
    file.write_text("model:\n  maskratio: 0.8\n")
    with pytest.raises(InputError, match=r"x\.yaml: there is no key model\.maskratio: did you mean model\.mask_ratio"):
        config.parse(["--config", str(file), "data.shards=s"])
    with pytest.raises(InputError, match=r"no key mask_ratio: did you mean model\.mask_ratio"):
        config.parse(["data.shards=s", "mask_ratio=0.9"])


def test_a_printed_configuration_explains_itself_and_reads_back(capsys, tmp_path):
    with pytest.raises(SystemExit) as ended:
        config.parse(["data.shards=s", "model.mask_ratio=0.9", "--print_config"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert re.search(r"# fraction of the tokens that are masked.*\n +mask_ratio: 0\.9\n", text)
    assert yaml.safe_load(text)["model"]["mask_ratio"] == 0.9
    file = tmp_path / "printed.yaml"
    file.write_text(text)
    assert config.parse(["--config", str(file)]) == config.parse(["data.shards=s", "model.mask_ratio=0.9"])
