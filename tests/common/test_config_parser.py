"""Help, suggestions, ranges and printed configurations all come from the declaration of each field."""

from dataclasses import dataclass, field

import pytest

from common.config_fields import check_ranges, option
from common.config_parser import ConfigParser
from common.errors import InputError
from training import config


@dataclass
class Color:
    """What is painted."""

    shade: str = option("red", free=True)
    """as a painter calls it"""
    coats: int = option(3, at_least=1, at_most=9)
    """layers of paint"""
    thickness: float | None = option(None, above=0)
    """in millimeters"""

    def __post_init__(self) -> None:
        check_ranges(self, "color")


@dataclass
class Wall:
    color: Color = field(default_factory=Color)
    height: float = 2.5
    """in meters"""


@pytest.fixture
def parser() -> ConfigParser:
    return ConfigParser("paint.py", "paint.py [key=value ...]", "Paint.", Wall)


def test_help_is_the_text_below_the_field(parser: ConfigParser) -> None:
    text = " ".join(parser.format_help().split())
    assert "What is painted" in text
    assert "as a painter calls it (type: str, default: red)" in text
    assert text.count("Path to a configuration file") == 0, "of sections"


@pytest.mark.parametrize(
    ("key", "suggestion"), [("shade", "color.shade"), ("colour.shade", "color.shade"), ("color.coat", "color.coats")]
)
def test_an_unknown_key_gets_a_suggestion(parser: ConfigParser, key: str, suggestion: str) -> None:
    with pytest.raises(InputError, match=rf"^there is no key {key}: did you mean {suggestion}\? `paint.py --help`"):
        parser.parse([f"{key}=1"])


def test_nothing_is_suggested_if_nothing_is_similar(parser: ConfigParser, tmp_path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("quux: {}\n")
    with pytest.raises(InputError, match=r"x.yaml: there is no key quux: `paint.py --help` lists every key$"):
        parser.parse(["--config", str(file)])


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("coats=0", "color.coats is 0: must be at least 1 and at most 9"),
        ("thickness=0", "color.thickness is 0.0: must be above 0, or null"),
        ("thickness=.inf", "color.thickness is inf: must be finite, above 0, or null"),
    ],
)
def test_a_value_out_of_range_is_one_sentence(parser: ConfigParser, override: str, sentence: str) -> None:
    with pytest.raises(InputError) as raised:
        parser.parse([f"color.{override}"])
    assert str(raised.value) == sentence


def test_overrides_stand_above_files_wherever_they_are(parser: ConfigParser, tmp_path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("color:\n  coats: 7\n  shade: blue\n")
    assert parser.parse(["color.coats=2", "--config", str(file)]).color == Color("blue", 2)


def test_every_key_of_a_run_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    for action in config._parser()._actions:
        assert action.help, f"{action.dest} has no docstring below it"
    with pytest.raises(SystemExit) as ended:
        config.parse(["--help"])
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.index("One run") < text.index("Where clips come from") < text.index("Architecture and objective")
