"""The trace: what a rank notes can be read by others, also when it is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from lockstep.supervise.trace_memory import _HEADER, ENTRIES, ENTRY, WHOLE, WORDS, Reading, TraceMemory

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")


def enter(collectives: TraceMemory, number: int = 1, **changed: int) -> int:
    given = dict.fromkeys(("payload", "location", "operation", "group", "phase"), 0)
    given |= {"flags": WHOLE, "batch": -1, "root": -1}
    return collectives.enter(number, **{**given, **changed})


def words(collectives: TraceMemory) -> dict[str, int]:
    return {
        "payload": collectives.word("payload", "float32 (4, 8) SUM", 32),
        "location": collectives.word("location", "/home/me/train.py", 88, "validation_step"),
        "operation": collectives.word("operation", "all_reduce"),
        "group": collectives.word("group", "0", [0, 2]),
        "phase": collectives.word("phase", "on_validation_epoch_end"),
    }


def test_what_is_noted_is_read() -> None:
    collectives = TraceMemory()
    reading = Reading(collectives.address)
    enter(collectives, 417, **words(collectives), batch=12)
    (note,) = reading.newest()
    assert (note.name, note.location, note.function) == ("all_reduce #417", "/home/me/train.py:88", "validation_step")
    assert (note.group, note.members, note.payload, note.elements) == ("0", (0, 2), "float32 (4, 8) SUM", 32)
    assert (note.phase, note.batch, note.root, note.whole) == ("on_validation_epoch_end", 12, -1, True)
    assert note.inside
    assert note.done is None


def test_a_note_that_was_half_written_told_of_a_wait_since_the_machine_started() -> None:
    """A note is packed value by value, and whoever writes it can be held up in between."""
    collectives = TraceMemory()
    reading = Reading(collectives.address)
    enter(collectives, 417)
    ENTRY.pack_into(collectives._memory, _HEADER + 64, 1, 417, *(0,) * 7, -1, 0.0, 0.0, 0.0)
    assert reading.newest() == []


def test_only_the_newest_are_kept() -> None:
    collectives = TraceMemory()
    reading = Reading(collectives.address)
    old = enter(collectives, 1)
    for number in range(2, ENTRIES + 10):
        enter(collectives, number)
    collectives.leave(old, complete=True)  # in its place is another by now
    notes = reading.notes(1)
    assert [note.number for note in notes] == list(range(notes[0].number, ENTRIES + 10))
    assert len(notes) >= ENTRIES - 2
    assert all(note.inside for note in notes)


def test_a_word_that_comes_again_takes_no_place() -> None:
    """Each fit of a process wrote all of its words once more, until there was no place for what the last one did."""
    collectives = TraceMemory()
    reading = Reading(collectives.address)
    for _ in range(WORDS // 1000 + 1):
        last = collectives.word("location", "x" * 1000, 1, "f")
    enter(collectives, 1, location=last)
    assert reading.newest()[0].location == f"{'x' * 1000}:1"


RANK = """
import sys, time, types
package = types.ModuleType("lockstep"); package.__path__ = [sys.argv[1]]; sys.modules["lockstep"] = package
from lockstep.supervise.trace_memory import own
own().enter(7, 0, 0, own().word("operation", "barrier"), 0, 0, 0, -1, -1)
assert "torch" not in sys.modules
print(own().address, flush=True)
time.sleep(60)
"""


def test_a_rank_that_was_killed_can_still_be_read() -> None:
    package = os.path.dirname(os.path.dirname(os.path.abspath(sys.modules[TraceMemory.__module__].__file__ or "")))
    with subprocess.Popen([sys.executable, "-c", RANK, package], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        reading = Reading(process.stdout.readline().strip())
        process.send_signal(signal.SIGSTOP)
        assert reading.newest()[0].name == "barrier #7"
        process.kill()
        process.wait()
    assert reading.newest()[0].name == "barrier #7"


def made(**changed: Any) -> Any:
    collectives = TraceMemory()
    given = words(collectives)
    if "operation" in changed:
        given["operation"] = collectives.word("operation", changed["operation"])
    if "payload" in changed:
        given["payload"] = collectives.word("payload", *changed["payload"])
    enter(collectives, 1, **given, root=changed.get("root", -1))
    return Reading(collectives.address).newest()[0]


@pytest.mark.parametrize(
    ("one", "other", "differ"),
    [
        ({}, {}, False),
        ({}, {"payload": ("float32 (4, 9) SUM", 36)}, True),
        ({}, {"payload": ("float32 (32,) SUM", 32)}, False),  # the same elements, which torch allows
        ({}, {"payload": ("float32 (4, 8) MAX", 32)}, True),
        ({}, {"payload": ("float32 (4, 8) ?", 32)}, False),
        ({"operation": "broadcast", "root": 0}, {"operation": "broadcast", "root": 1}, True),
        ({"operation": "broadcast", "root": 0}, {"operation": "broadcast"}, False),  # it was given as group_src
        ({"operation": "all_gather"}, {"operation": "all_gather", "payload": ("float32 (2,)", 2)}, False),  # uneven
    ],
)
def test_what_ranks_have_to_do_alike(one: dict[str, Any], other: dict[str, Any], differ: bool) -> None:
    assert made(**one).differs(made(**other)) is differ
    assert made(**other).differs(made(**one)) is differ


@pytest.mark.parametrize(
    ("one", "other", "clash"),
    [
        ("uint8 (8,)", "uint8 (8,)", False),
        ("uint8 (8,)", "uint8 (40,)", True),
        ("float64 (1,)", "uint8 (8,)", False),
        ("bfloat16 (4,)", "float32 (4,)", True),
        ("bool (4,)", "float8_e4m3fn (4,)", False),
        ("", "uint8 (8,)", False),
    ],
)
def test_gathers_of_other_sizes_end_gloo(one: str, other: str, clash: bool) -> None:
    def gather(payload: str) -> Any:
        elements = int(payload.partition("(")[2].partition(",")[0] or -1)
        return made(operation="all_gather", payload=(payload, elements))

    assert gather(one).clashes(gather(other)) is clash


class Slow(dict[str, int]):
    """Lets another thread come between a look and what follows from it."""

    def __getitem__(self, key: str) -> int:
        found = super().__getitem__(key)
        time.sleep(0.001)
        return found


def test_words_of_several_threads_keep_their_numbers() -> None:
    """Two threads once counted a word of each as one, and all later words were read as those before them."""
    collectives = TraceMemory()
    collectives._counts = Slow(collectives._counts)
    said: list[tuple[int, int]] = []

    def say(start: int) -> None:
        said.extend((collectives.word("payload", f"of {value}", value), value) for value in range(start, start + 10))

    threads = [threading.Thread(target=say, args=(10 * number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reading = Reading(collectives.address)
    assert [reading._word("payload", number, [])[1] for number, _ in said] == [value for _, value in said]
