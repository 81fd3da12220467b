"""What stays in a cache and what goes, whoever is killed, whatever is damaged."""

import os
import signal
import threading
import warnings
from pathlib import Path

import pytest

from common.errors import InputError
from pipeline.reading import ledger as room
from pipeline.reading.ledger import LEDGER, Holder, Ledger, NoRoomError

SIZE = 100


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    """Of a folder that may hold four files."""
    return Ledger(tmp_path, 4 * SIZE)


def put(ledger: Ledger, folder: Path, holder: Holder, *names: str, ahead: bool = False) -> None:
    """As downloads do."""
    for name in names:
        path = folder / f"{name}.tar"
        ledger.admit(path, SIZE, holder, ahead=ahead)
        path.write_bytes(bytes(SIZE))


def held(folder: Path) -> str:
    return "".join(sorted(path.stem for path in folder.glob("*.tar")))


def let_go(ledger: Ledger, folder: Path, holder: Holder, **wanted_in: float | None) -> None:
    ledger.release({folder / f"{name}.tar": seconds for name, seconds in wanted_in.items()}, holder)


def test_first_goes_what_nobody_wants_then_what_is_wanted_last(ledger: Ledger, tmp_path: Path) -> None:
    me = ledger.holder()
    put(ledger, tmp_path, me, "a", "b", "c", "d")
    let_go(ledger, tmp_path, me, a=900, b=5000, c=None)
    put(ledger, tmp_path, me, "e")
    assert held(tmp_path) == "abde"
    put(ledger, tmp_path, me, "f")
    assert held(tmp_path) == "adef"
    put(ledger, tmp_path, me, "g")
    assert held(tmp_path) == "defg"


def test_of_what_nobody_wants_the_least_recently_used_goes(ledger: Ledger, tmp_path: Path) -> None:
    me = ledger.holder()
    put(ledger, tmp_path, me, "a", "b", "c", "d")
    put(ledger, tmp_path, me, "b", "a")
    let_go(ledger, tmp_path, me, a=None, b=None, c=-60, d=None)  # c was to be read a minute ago, and was not
    put(ledger, tmp_path, me, "e", "f", "g")
    assert held(tmp_path) == "aefg"


def test_what_is_expected_stays_unless_a_reader_waits(ledger: Ledger, tmp_path: Path) -> None:
    me, other = ledger.holder(), Ledger(tmp_path, 4 * SIZE).holder()
    put(ledger, tmp_path, me, "a", "b", "c")
    put(ledger, tmp_path, other, "a", "d")
    with pytest.raises(NoRoomError):
        put(ledger, tmp_path, me, "e", ahead=True)
    let_go(ledger, tmp_path, me, a=None)  # the other one expects it
    with pytest.raises(NoRoomError):
        put(ledger, tmp_path, me, "e", ahead=True)
    assert held(tmp_path) == "abcd"
    put(ledger, tmp_path, me, "e")
    assert held(tmp_path) == "acde"
    other.close()
    put(ledger, tmp_path, me, "f", ahead=True)
    assert held(tmp_path) == "cdef"
    assert len(list(tmp_path.glob(".*.holder"))) == 1


def test_a_miss_does_not_look_through_the_folder(ledger: Ledger, tmp_path: Path, monkeypatch) -> None:
    me = ledger.holder()
    put(ledger, tmp_path, me, "a")
    monkeypatch.setattr(Path, "rglob", lambda *_: pytest.fail("a walk"))
    for name in "bcdefgh":
        put(ledger, tmp_path, me, name)
        let_go(ledger, tmp_path, me, **{name: None})
    assert held(tmp_path) == "afgh"


def killed_at(call: str, ledger: Ledger, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of its own holds c and d, and is killed while it makes room for e."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # threads of other tests
        process = os.fork()
    if not process:
        me = ledger.holder()
        put(ledger, folder, me, "c", "d")
        monkeypatch.setattr(room, call, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        put(ledger, folder, me, "e")
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(process, 0)[1]) == signal.SIGKILL


@pytest.mark.parametrize("call", ["_first", "_drop"])  # before the file is removed, and behind it
def test_a_kill_leaves_a_ledger_that_is_right(call: str, ledger: Ledger, tmp_path: Path, monkeypatch) -> None:
    me = ledger.holder()
    put(ledger, tmp_path, me, "a", "b")
    let_go(ledger, tmp_path, me, a=None, b=None)
    killed_at(call, ledger, tmp_path, monkeypatch)
    (tmp_path / ".b.tar.7.partial").touch()
    put(ledger, tmp_path, me, "f", "g", "h", ahead=True)  # those that the killed one held are free
    assert len(held(tmp_path)) == 4
    assert set("fgh") < set(held(tmp_path))
    assert len(list(tmp_path.glob(".*.holder"))) == 1
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("damage", ["no ledger", "garbage", "cut", "another version", "files removed", "files added"])
def test_a_ledger_that_is_not_right_is_made_anew(damage: str, ledger: Ledger, tmp_path: Path) -> None:
    me = ledger.holder()
    put(ledger, tmp_path, me, "a", "b", "c")
    let_go(ledger, tmp_path, me, a=None, b=None, c=None)
    file = tmp_path / LEDGER
    if damage == "no ledger":
        file.unlink()
    elif damage == "garbage":
        file.write_bytes(b"garbage" * 1000)
    elif damage == "cut":
        os.truncate(file, 5000)
    elif damage == "another version":
        with open(file, "r+b") as opened:
            opened.seek(60)  # of user_version, big endian
            opened.write((99).to_bytes(4, "big"))
    elif damage == "files removed":
        (tmp_path / "a.tar").unlink()
        (tmp_path / "b.tar").unlink()
    else:
        file.unlink()
        (tmp_path / "d.tar").write_bytes(bytes(SIZE))
    put(ledger, tmp_path, me, "e", "f", "g")
    assert len(held(tmp_path)) == 4
    assert set("efg") < set(held(tmp_path))


def test_links_are_refused(ledger: Ledger, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("dear")
    (tmp_path / LEDGER).symlink_to(victim)
    with pytest.raises(InputError, match=r"ledger\.sqlite is a link: remove it"):
        ledger.admit(tmp_path / "a.tar", SIZE, ledger.holder())
    (tmp_path / LEDGER).unlink()
    (tmp_path / ".ledger.lock").unlink()
    (tmp_path / ".ledger.lock").symlink_to(victim)
    with pytest.raises(InputError, match=r"ledger\.lock is a link: remove it"):
        ledger.holder()
    assert victim.read_text() == "dear"


def test_a_ledger_that_cannot_be_written_is_one_sentence(ledger: Ledger, tmp_path: Path) -> None:
    (tmp_path / LEDGER).mkdir()
    with pytest.raises(InputError, match=r"ledger\.sqlite cannot be written \(.*\): free some space, or name another"):
        ledger.admit(tmp_path / "a.tar", SIZE, ledger.holder())


def test_many_at_once_keep_to_the_size(tmp_path: Path) -> None:
    failures: list[BaseException] = []

    def fill(number: int) -> None:
        try:
            mine = Ledger(tmp_path, 4 * SIZE)
            me = mine.holder()
            for turn in range(10):
                put(mine, tmp_path, me, f"{number}-{turn}")
                let_go(mine, tmp_path, me, **{f"{number}-{turn}": float(turn) or None})
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=fill, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    me = (last := Ledger(tmp_path, 4 * SIZE)).holder()
    put(last, tmp_path, me, "end")
    assert len(list(tmp_path.glob("*.tar"))) == 4
