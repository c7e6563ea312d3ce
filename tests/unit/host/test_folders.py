"""Folders of one user alone: what code is run from, and what is answered at, is nobody else's."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

import pytest

from tep.base.errors import UsageError
from tep.host import folders
from tep.host.folders import make_own
from tests.support import verbs_stub


def test_a_folder_is_made_for_one_user_alone(tmp_path: Path) -> None:
    """The umask could leave it open to others."""
    folder = tmp_path / "mine"
    before = os.umask(0)
    try:
        assert folder == make_own(folder, "")
    finally:
        os.umask(before)
    assert 0o40700 == folder.stat().st_mode
    assert folder == make_own(folder, ""), "the one that is there"


@pytest.mark.parametrize("mode", [0o777, 0o750, 0o702])
def test_a_folder_that_others_may_open_is_refused(tmp_path: Path, mode: int) -> None:
    """Whoever can write there has the next user run their code."""
    tmp_path.chmod(mode)
    with pytest.raises(UsageError, match=f"with mode {mode:o}.*; remove it, or move"):
        make_own(tmp_path, "move")


def test_a_link_to_a_folder_is_refused(tmp_path: Path) -> None:
    """Whoever made the link can turn it elsewhere after the check."""
    link = tmp_path / "link"
    link.symlink_to(tmp_path, target_is_directory=True)
    tmp_path.chmod(0o700)
    with pytest.raises(UsageError, match="is no folder"):
        make_own(link, "")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's folder")
def test_a_library_that_another_user_planted_is_not_loaded(tmp_path, monkeypatch) -> None:
    """The stub of verbs was loaded from a folder whose name anybody can foretell."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    source = verbs_stub._SOURCE.read_bytes()
    digest = hashlib.sha256(source).hexdigest()[:16]
    folder = tmp_path / f"tep-verbs-stub-{os.getuid()}-{digest}"
    folder.mkdir(mode=0o700)
    (folder / "libibverbs_stub.so").write_bytes(b"no library")
    os.chown(folder, 65534, 65534)
    monkeypatch.setattr(verbs_stub.shutil, "which", lambda _: "cc")
    with pytest.raises(UsageError, match="belongs to user 65534"):
        verbs_stub.build.__wrapped__()


def test_the_folder_of_the_login_is_preferred_where_it_is_private(monkeypatch) -> None:
    """Sockets in a folder that others may open could be taken by them."""
    here, anywhere = Path("/run/user/7/tep"), Path("/tmp/tep-7")  # noqa: S108  # no file is made
    monkeypatch.setattr(folders, "unsafe", lambda _folder, _uid: None)
    assert [here, anywhere] == list(folders.usual_folders(7))
    monkeypatch.setattr(folders, "unsafe", lambda _folder, _uid: "it is open to all")
    assert [anywhere] == list(folders.usual_folders(7))
