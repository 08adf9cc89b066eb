"""The folder: bounded in size and writes per day, shared without harm, tidied with a warning."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from mlx_cb.ssd.block_file import BlockKind
from mlx_cb.ssd.folder import LEDGER_UNIT, BlockFolder, FolderLimits

KIND = BlockKind(b"i" * 32, 2000)
ROOMY = FolderLimits(10**9, 10**9)


def content_of(index: int) -> bytes:
    return index.to_bytes(4, "big") * 500


def hash_of(index: int) -> bytes:
    return index.to_bytes(16, "big")


def folder(
    path: Path, limits: FolderLimits = ROOMY, kind: BlockKind = KIND, day: str = "2026-01-01"
) -> BlockFolder:
    return BlockFolder(path / "ssd", kind, limits, lambda: day)


def files(path: Path) -> list[Path]:
    return sorted(found for found in path.rglob("*.kv"))


def test_blocks_are_found_again_after_a_restart(tmp_path: Path) -> None:
    first = folder(tmp_path)
    assert first.open() == set()
    for index in range(5):
        assert first.write(hash_of(index), content_of(index)) == set()
    second = folder(tmp_path)
    assert second.open() == {hash_of(index) for index in range(5)}
    assert second.read(hash_of(3)) == content_of(3)
    assert second.read(hash_of(9)) is None
    assert second.num_bytes == 5 * KIND.file_size == sum(f.stat().st_size for f in files(tmp_path))
    for found in [tmp_path / "ssd", *(tmp_path / "ssd").rglob("*")]:
        assert stat.S_IMODE(found.stat().st_mode) == (0o700 if found.is_dir() else 0o600), found


def test_the_longest_unused_go_when_it_is_full(tmp_path: Path) -> None:
    full = folder(tmp_path, FolderLimits(3 * KIND.file_size, 10**9))
    full.open()
    for index in range(3):
        full.write(hash_of(index), content_of(index))
    assert full.read(hash_of(0)) == content_of(0)
    full.note_use(hash_of(0), found=True)
    assert full.write(hash_of(3), content_of(3)) == {hash_of(1)}
    assert full.num_bytes == 3 * KIND.file_size
    assert len(files(tmp_path)) == 3
    assert full.read(hash_of(1)) is None


def test_another_models_old_files_make_room_and_are_not_ours(tmp_path: Path) -> None:
    other = folder(tmp_path, kind=BlockKind(b"o" * 32, 2000))
    other.open()
    other.write(hash_of(1), content_of(1))
    os.utime(files(tmp_path)[0], (1, 1))
    ours = folder(tmp_path, FolderLimits(2 * KIND.file_size, 10**9))
    assert ours.open() == set()
    for index in range(2):
        assert ours.write(hash_of(index), content_of(index)) == set()
    assert other.read(hash_of(1)) is None
    assert len(files(tmp_path)) == 2


def test_what_was_written_today_is_counted_over_all_servers(tmp_path: Path) -> None:
    big = BlockKind(b"b" * 32, LEDGER_UNIT)
    limits = FolderLimits(10**9, 4 * LEDGER_UNIT)
    one, two = folder(tmp_path, limits, big), folder(tmp_path, limits, big)
    for each in (one, two):
        each.open()
        each.write(os.urandom(16), b"x" * LEDGER_UNIT)
    assert one.may_write(big.num_bytes)
    one.write(os.urandom(16), b"x" * LEDGER_UNIT)
    assert not one.may_write(big.num_bytes)
    assert not two.may_write(big.num_bytes)
    assert not folder(tmp_path, limits, big).may_write(big.num_bytes), "a restart changes nothing"
    tomorrow = folder(tmp_path, limits, big, day="2026-01-02")
    tomorrow.open()
    assert tomorrow.may_write(big.num_bytes)
    assert not (tmp_path / "ssd" / "written-2026-01-01").exists()


def test_foreign_files_are_left_alone_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = folder(tmp_path)
    first.open()
    first.write(hash_of(1), content_of(1))
    (whole,) = files(tmp_path)
    (tmp_path / "ssd" / "notes.txt").write_text("mine")
    (whole.parent / "photo.jpg").write_text("mine")
    cut = whole.parent / f"{hash_of(2).hex()}.kv"
    cut.write_bytes(whole.read_bytes()[:-1])
    old, new = whole.parent / ".a.1.1.part", whole.parent / ".b.2.2.part"
    old.write_bytes(b"half")
    os.utime(old, (1, 1))
    new.write_bytes(b"half")
    second = folder(tmp_path)
    caplog.clear()
    assert second.open() == {hash_of(1)}
    assert len(caplog.records) == 1
    assert "2 files or folders are not ours" in caplog.text
    assert "2 half-written" in caplog.text
    left = {found.name for found in (tmp_path / "ssd").rglob("*") if found.is_file()}
    assert left == {"notes.txt", "photo.jpg", whole.name, new.name}, "another server writes one"


def test_a_damaged_file_is_met_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ours = folder(tmp_path)
    ours.open()
    ours.write(hash_of(1), content_of(1))
    (path,) = files(tmp_path)
    damaged = bytearray(path.read_bytes())
    damaged[500] ^= 1
    path.write_bytes(damaged)
    caplog.clear()
    for _ in range(3):
        assert ours.read(hash_of(1)) is None
    assert len(caplog.records) == 1
    assert "checksum" in caplog.text
    assert ours.num_unusable == 1


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        BlockFolder(tmp_path / "file" / "ssd", KIND, ROOMY).open()
    with pytest.raises(OSError, match="more than is allowed"):
        folder(tmp_path, FolderLimits(10, 10)).open()


def test_two_servers_in_one_folder(tmp_path: Path) -> None:
    """Both write, read and delete the same names at once: whatever is read is right."""
    limits = FolderLimits(8 * KIND.file_size, 10**9)
    wrong: list[int] = []

    def serve(seed: int) -> None:
        mine = folder(tmp_path, limits)
        mine.open()
        for turn in range(150):
            index = (turn * seed) % 13
            mine.write(hash_of(index), content_of(index))
            found = mine.read(hash_of((turn * 5) % 13))
            if found is not None and found != content_of((turn * 5) % 13):
                wrong.append(turn)

    threads = [threading.Thread(target=serve, args=(seed,)) for seed in (3, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    survivor = folder(tmp_path, limits)
    known = survivor.open()
    assert 0 < len(known) <= 8
    assert survivor.num_unusable == 0
    for content_hash in known:
        assert survivor.read(content_hash) == content_of(int.from_bytes(content_hash, "big"))
    assert not list((tmp_path / "ssd").rglob("*.part"))
