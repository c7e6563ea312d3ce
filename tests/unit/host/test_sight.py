"""Sight into running engines: who may ask, what is answered, and that no client can do harm."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import tep
from tep.cli import main
from tep.host import sight
from tests.support.descriptors import descriptors, opened_since


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for sockets of this test alone, with a name short enough for one."""
    path = tmp_path_factory.mktemp("s")
    path.chmod(0o700)
    monkeypatch.setenv(sight.SWITCH, str(path))
    return path


def mine() -> sight.Found:
    [found] = sight.find(os.getpid())
    return found


def write_once(source: tep.TransferEngine, target: tep.TransferEngine) -> None:
    src, _ = source.reg_mr(np.ones(4096, np.uint8))
    _, dst = target.reg_mr(np.zeros(4096, np.uint8))
    source.submit_single_write(4096, (src, 0), (dst, 0)).wait(60)


def test_a_process_tells_what_its_engines_did_and_wait_for(folder: Path) -> None:
    """The report would miss an engine of the process, or what it waits for."""
    with (
        tep.TransferEngine.open("local", nics=2, name="ana") as ana,
        tep.TransferEngine.open("local", nics=1, name="bob") as bob,
    ):
        write_once(ana, bob)
        bob.expect_imm_count(77, 3)
        answer = sight.ask(mine())
        assert answer is not None
        reports = {engine["name"]: engine["report"] for engine in answer["engines"]}

    assert answer["pid"] == os.getpid()
    assert {"ana", "bob"} == reports.keys()
    assert "engine ana: 0 open" in reports["ana"]
    assert "0x4d: 0 of 3 arrived" in reports["bob"]


def test_the_last_engine_takes_thread_socket_and_descriptors_along(folder: Path) -> None:
    """Engines that come and go would pile up threads, sockets or descriptors."""
    with tep.TransferEngine.open("local", name="first"):
        pass  # what a first engine leaves open for good
    gc.collect()  # drivers close what they have when they are collected
    before, threads = descriptors(), set(threading.enumerate())
    with tep.TransferEngine.open("local", name="ana"), tep.TransferEngine.open("local", name="bob"):
        assert 1 == len(list(folder.iterdir()))
    gc.collect()

    assert [] == list(folder.iterdir())
    assert set() == opened_since(before)
    assert set() == set(threading.enumerate()) - threads


def test_an_engine_that_was_only_dropped_is_not_shown(folder: Path) -> None:
    """The look-out would keep an engine alive that nobody holds."""
    ana = tep.TransferEngine.open("local", name="ana")
    with tep.TransferEngine.open("local", name="bob"):
        warned = pytest.warns(ResourceWarning, match="ana")
        del ana
        with warned:
            gc.collect()
        answer = sight.ask(mine())
        assert answer is not None

        assert ["bob"] == [engine["name"] for engine in answer["engines"]]


@pytest.mark.parametrize("switch", ["off", None])
def test_it_can_be_switched_off_and_inline_engines_pay_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, switch: str | None
) -> None:
    """A process that asked for no look-out, or turns its engines itself, would have a thread."""
    gc.collect()
    threads = threading.active_count()
    if switch is None:
        with tep.TransferEngine.open("loopback", driver=tep.InlineDriver()):
            assert threads == threading.active_count()
    else:
        monkeypatch.setenv(sight.SWITCH, switch)
        with tep.TransferEngine.open("local"):
            assert threads + 1 == threading.active_count()

    assert [] == list(folder.iterdir())


@pytest.mark.slow
def test_broken_clients_end_nothing_and_stall_nobody(folder: Path) -> None:
    """A client that is silent, talks nonsense, or hangs up would end the answers or an engine."""
    with (
        tep.TransferEngine.open("local", name="ana") as ana,
        tep.TransferEngine.open("local", name="bob") as bob,
    ):
        path = str(mine().path)
        held = [socket.socket(socket.AF_UNIX) for _ in range(3)]
        for one in held:  # silent: they do not read what is sent
            one.connect(path)
        for said in (b"", b"\0\xff" * 4000, b"top\n" * 1000, b"top"):
            with socket.socket(socket.AF_UNIX) as rude:
                rude.connect(path)
                rude.sendall(said)  # and gone, whatever is answered
        write_once(ana, bob)
        answer = sight.ask(mine(), 30)
        for one in held:
            one.close()

    assert answer is not None
    assert 2 == len(answer["engines"])


def test_it_is_read_while_the_engine_is_busy(folder: Path) -> None:
    """A table that changes while it is read would end the thread that answers."""
    with (
        tep.TransferEngine.open("local", nics=2, name="ana") as ana,
        tep.TransferEngine.open("local", nics=2, name="bob") as bob,
    ):
        src, _ = ana.reg_mr(np.ones(4096, np.uint8))
        _, dst = bob.reg_mr(np.zeros(4096, np.uint8))
        expected = bob.expect_imm_count(1, 2 * 600)
        open_ones = [
            ana.submit_single_write(4096, (src, 0), (dst, 0), imm=1) for _ in range(300)
        ]  # and so on while it is asked
        for _ in range(10):
            open_ones += [
                ana.submit_single_write(4096, (src, 0), (dst, 0), imm=1) for _ in range(30)
            ]
            answer = sight.ask(mine(), 30)
            assert answer is not None
            assert {"ana", "bob"} == {engine["name"] for engine in answer["engines"]}
        for one in open_ones:
            one.wait(60)
        expected.cancel()


def test_a_folder_that_others_may_open_is_not_used(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else could ask, or answer in the name of a process. Yet the engine opens."""
    elsewhere = folder / "link"
    elsewhere.symlink_to(folder, target_is_directory=True)
    places = {folder: "mode 755", elsewhere: "is no folder", folder / ("x" * 200): "too long"}
    for path, why in places.items():
        folder.chmod(0o755 if path == folder else 0o700)
        monkeypatch.setenv(sight.SWITCH, str(path))
        caplog.clear()
        with (
            caplog.at_level(logging.WARNING, "tep"),
            tep.TransferEngine.open("local", name="ana") as ana,
        ):
            assert "ana" == ana.name
            assert why in caplog.text
            assert "cannot see this process" in caplog.text

    assert [] == list(folder.glob("*.*")) + list((folder / ("x" * 200)).iterdir())


def test_what_a_killed_process_left_is_removed(folder: Path) -> None:
    """Each process that was killed would be named as one that does not answer, for ever."""
    left = folder / f"{os.getpid()}.0123"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(left))
    [found] = sight.find()

    assert sight.ask(found) is None
    assert not left.exists()


def test_whoever_opens_next_removes_what_killed_processes_left(folder: Path) -> None:
    """Only whoever asked did: sockets of killed jobs filled the folder, 139 in a day."""
    for number in (1, os.getpid(), 2**40):  # another process runs, this one, and none can
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(folder / f"{number}.0123"))
    note = folder / "123.txt"
    note.touch()
    with socket.socket(socket.AF_UNIX) as served:
        served.bind(str(folder / "9.4567"))
        served.listen(1)
        with tep.TransferEngine.open("local", name="ana"):
            names = {path.name for path in folder.iterdir()}
            mine = {name for name in names if name.startswith(f"{os.getpid()}.")}
        served.setblocking(False)
        with pytest.raises(BlockingIOError):
            served.accept()  # nobody has called it

    assert 1 == len(mine)
    assert {"9.4567", "123.txt"} == names - mine


@pytest.mark.slow
def test_a_child_of_a_fork_does_not_answer_for_its_parent(folder: Path) -> None:
    """Questions to the parent would hang at the child, which has no thread to answer them."""
    program = """if True:
        import os, sys, tep
        from tep.host import sight
        with tep.TransferEngine.open("local", name="ana"):
            child = os.fork()
            if child == 0:
                assert not sight._Here.seen and sight._Here.thread is None
                os.read(0, 1)
                os._exit(0)
            [found] = sight.find(os.getpid())
            print(sight.ask(found, 30)["engines"][0]["name"], flush=True)
        [] == sight.find() or sys.exit("the socket is still there")
        os.kill(child, 9)
    """
    ran = subprocess.run([sys.executable, "-c", program], stdin=subprocess.PIPE, text=True,
                         stdout=subprocess.PIPE, timeout=120, check=True)  # fmt: skip

    assert "ana\n" == ran.stdout
    assert [] == list(folder.iterdir())


HANGS = """if True:
    import threading, tep, numpy as np
    def blocks(_): print("here", flush=True); threading.Event().wait()
    opened = tep.TransferEngine.open
    with opened("local", name="ana") as ana, opened("local", name="bob") as bob:
        src, _ = ana.reg_mr(np.ones(64, np.uint8))
        _, dst = bob.reg_mr(np.ones(64, np.uint8))
        late = bob.expect_imm_count(5, 2)
        ana.submit_single_write(64, (src, 0), (dst, 0), imm=5, on_done=blocks)
        ana.submit_single_write(64, (src, 0), (dst, 0)).wait()
        late.wait(3600)
"""


@pytest.mark.slow
def test_a_process_that_hangs_tells_what_it_waits_for(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The report would be missing just where it is needed: the thread of the engine is blocked."""
    with subprocess.Popen([sys.executable, "-c", HANGS], stdout=subprocess.PIPE) as hanging:
        try:
            assert hanging.stdout is not None
            assert b"here\n" == hanging.stdout.readline()
            assert 0 == main(["stall", str(hanging.pid), "--timeout", "60"])
            text = capsys.readouterr().out
            assert 0 == main(["stall", str(hanging.pid), "--json", "--timeout", "60"])
            (process,) = json.loads(capsys.readouterr().out)["processes"]
            with tep.TransferEngine.open("local", name="carl"):
                assert 0 == main(["stall", "--timeout", "60"])
                both = capsys.readouterr().out
                hanging.send_signal(signal.SIGSTOP)
                assert 1 == main(["stall", "--timeout", "0.2"])
                stopped = capsys.readouterr()
        finally:
            hanging.kill()

    assert "imm 0x5: 1 of 2 arrived; pending" in text
    assert "blocks (<string>:3)" in text
    assert {"ana", "bob"} == {engine["name"] for engine in process["engines"]}
    assert "imm 0x5: 1 of 2 arrived; pending" in both
    assert "engine carl: 0 open" in both
    assert "engine carl: 0 open" in stopped.out
    assert "kill -CONT" in stopped.err


def test_a_process_without_engines_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mistyped number would look like a process that waits for nothing."""
    assert 1 == main(["stall", str(os.getpid())])
    assert "shows no engine" in capsys.readouterr().err
    assert 1 == main(["stall", "4194304"])
    assert "there is no process 4194304" in capsys.readouterr().err
    assert 1 == main(["stall"])
    assert "shows an engine" in capsys.readouterr().err


def _served(path: Path, raw: bytes) -> threading.Thread:
    """Answer once at a socket, as a process with many engines does."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def serve() -> None:
        client, _ = listener.accept()
        with listener, client, contextlib.suppress(OSError):  # whoever asked may be gone
            client.sendall(raw)

    thread = threading.Thread(target=serve)
    thread.start()
    return thread


def test_an_answer_of_many_pieces_is_read_to_its_end(folder: Path) -> None:
    """A process with many engines would not be shown at all."""
    thread = _served(folder / "7.a", json.dumps({"pid": 7, "engines": ["x" * 200_000]}).encode())
    answer = sight.ask(sight.Found(7, folder / "7.a", os.geteuid()))
    thread.join()

    assert answer is not None
    assert 200_000 == len(answer["engines"][0])


def test_a_socket_of_another_user_is_not_believed(folder: Path) -> None:
    """Anybody could answer for a process that has ended."""
    thread = _served(folder / "7.a", b"{}")
    with pytest.raises(PermissionError, match="another user"):
        sight.ask(sight.Found(7, folder / "7.a", os.geteuid() + 1))
    thread.join()


def test_a_user_is_told_from_a_group(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user whose group has another number would be shown none of the own processes."""
    thread = _served(folder / "7.a", b"{}")
    found = SimpleNamespace(size=12, unpack=lambda _: (7, os.geteuid(), os.geteuid() + 1))
    monkeypatch.setattr(sight, "_CREDENTIALS", found)

    assert {} == sight.ask(sight.Found(7, folder / "7.a", os.geteuid()))
    thread.join()


@pytest.mark.parametrize(("user", "answered"), [(0, True), (4711, True), (4712, False)])
def test_root_and_the_owner_may_ask_and_nobody_else(
    folder: Path, monkeypatch: pytest.MonkeyPatch, user: int, answered: bool
) -> None:
    """Addresses and sizes of somebody's job are nobody else's business."""
    with tep.TransferEngine.open("local", name="ana"):
        path = str(mine().path)
        monkeypatch.setattr(sight, "_user_of", lambda _: user)
        monkeypatch.setattr(os, "geteuid", lambda: 4711)
        with socket.socket(socket.AF_UNIX) as asking:
            asking.settimeout(20)
            asking.connect(path)
            got = b""
            with contextlib.suppress(ConnectionError):  # it may hang up before it is asked
                got = asking.recv(64)
        monkeypatch.undo()

    assert answered == bool(got)


def test_the_thread_has_let_go_when_the_last_engine_is_closed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that then gives its user up, or forks, would take the socket along."""
    slow, close = threading.Event(), sight._Listener.close

    def closed_late(listener: sight._Listener) -> None:
        slow.wait(0.1)
        close(listener)

    monkeypatch.setattr(sight._Listener, "close", closed_late)
    with tep.TransferEngine.open("local"):
        pass

    assert [] == list(folder.iterdir())
