"""One block's file: whole or not used, private, bound to one model and one content."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from mlx_cb.ssd.block_file import BlockKind, UnusableFile, read_file, write_file

KIND = BlockKind(bytes(range(32)), 1000)
HASH = b"h" * 16
CONTENT = os.urandom(1000)


def test_what_is_written_is_read_and_nobody_else_may(tmp_path: Path) -> None:
    path = tmp_path / "block.kv"
    before = os.umask(0)
    try:
        write_file(path, KIND, HASH, CONTENT)
    finally:
        os.umask(before)
    assert read_file(path, KIND, HASH) == CONTENT
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.stat().st_size == KIND.file_size
    assert os.listdir(tmp_path) == ["block.kv"], "no passing file is left"


def test_every_flipped_byte_and_every_cut_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "block.kv"
    write_file(path, KIND, HASH, CONTENT)
    whole = path.read_bytes()
    for index in range(len(whole)):
        path.write_bytes(whole[:index] + bytes([whole[index] ^ 0x10]) + whole[index + 1 :])
        with pytest.raises(UnusableFile):
            read_file(path, KIND, HASH)
    for length in (0, 1, 67, 68, 69, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(UnusableFile, match="bytes instead of"):
            read_file(path, KIND, HASH)
    path.write_bytes(whole + b"x")
    with pytest.raises(UnusableFile):
        read_file(path, KIND, HASH)


def test_another_models_or_contents_file_is_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "block.kv"
    write_file(path, KIND, HASH, CONTENT)
    with pytest.raises(UnusableFile, match="another model"):
        read_file(path, replace(KIND, identity=b"x" * 32), HASH)
    with pytest.raises(UnusableFile, match="another block"):
        read_file(path, KIND, b"g" * 16)


def test_links_and_folders_are_not_followed(tmp_path: Path) -> None:
    target, link, folder = tmp_path / "target", tmp_path / "link.kv", tmp_path / "folder.kv"
    write_file(target, KIND, HASH, CONTENT)
    link.symlink_to(target)
    folder.mkdir()
    for path in (link, folder):
        with pytest.raises(UnusableFile):
            read_file(path, KIND, HASH)
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "absent.kv", KIND, HASH)


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "block.kv").mkdir()  # the rename cannot succeed
    with pytest.raises(IsADirectoryError):
        write_file(tmp_path / "block.kv", KIND, HASH, CONTENT)
    assert os.listdir(tmp_path) == ["block.kv"]
