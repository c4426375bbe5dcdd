"""Records in a file without a name: what was written is read, or its loss is told."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
import weakref

import numpy as np
import pytest

from jkv.cache import disk_pages as host
from jkv.cache.disk_pages import ALIGN, BLOCK, Records


def test_records_are_read_in_any_order(tmp_path):
    """Beside a dict that a person keeps by hand; several in a row, backwards, twice, none, and two sizes."""
    rng, records, held = np.random.default_rng(0), Records(tmp_path), []
    for n, blocks in ((5, 1), (3, 2), (1, 1), (4, 2)):
        new = rng.integers(0, 256, (n, blocks * BLOCK), np.uint8)
        numbers, sums = records.append(new)
        assert int(numbers[0]) * BLOCK % ALIGN == 0
        held += [(blocks, number, s, x) for number, s, x in zip(numbers, sums, new, strict=True)]
    for blocks in (1, 2):
        mine = [x for x in held if x[0] == blocks]
        for _ in range(20):
            order = rng.integers(-1, len(mine), 9)
            order[:4] = sorted(order[:4])
            numbers = np.asarray([mine[i][1] if i >= 0 else -1 for i in order], np.int32)
            sums = np.asarray([mine[i][2] if i >= 0 else 0 for i in order], np.uint32)
            want = np.stack([mine[i][3] if i >= 0 else np.zeros(blocks * BLOCK, np.uint8) for i in order])
            np.testing.assert_array_equal(records.read(numbers, sums, blocks * BLOCK), want)
    assert records.written == sum(x.nbytes for *_, x in held)


def test_read_of_overwritten_records_raises(tmp_path):
    records = Records(tmp_path, most=4 * ALIGN)
    kept = [records.append(np.full((2, BLOCK), i, np.uint8)) for i in range(6)]
    for i, (numbers, sums) in enumerate(kept):
        if i < 2:
            with pytest.raises(OSError, match=r"overwritten by newer ones.*prefill the prompt again"):
                records.read(numbers, sums, BLOCK)
        else:
            assert (records.read(numbers, sums, BLOCK) == i).all()
    assert os.fstat(records.file.fileno()).st_size <= 4 * ALIGN
    with pytest.raises(OSError, match="its file may have 16,384"):
        records.append(np.zeros((9, BLOCK), np.uint8))


def test_damaged_and_truncated_records_raise(tmp_path):
    records = Records(tmp_path)
    numbers, sums = records.append(np.arange(2 * BLOCK, dtype=np.uint32).astype(np.uint8).reshape(2, BLOCK))
    os.pwrite(records.file.fileno(), b"x", BLOCK + 7)
    assert records.read(numbers[:1], sums[:1], BLOCK)[0, 5] == 5
    with pytest.raises(OSError, match="CRC-32"):
        records.read(numbers, sums, BLOCK)
    os.ftruncate(records.file.fileno(), BLOCK // 2)
    with pytest.raises(OSError, match="CRC-32"):
        records.read(numbers[:1], sums[:1], BLOCK)


def test_full_disk_raises_and_keeps_records(tmp_path, monkeypatch):
    records = Records(tmp_path)
    numbers, sums = records.append(np.full((1, BLOCK), 3, np.uint8))
    write = os.pwrite

    def full(file: int, data: memoryview, at: int) -> int:
        if len(data) <= BLOCK:
            raise OSError(28, "No space left on device")
        return write(file, data[:BLOCK], at)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match=r"No space left.*free space, or name another folder"):
        records.append(np.full((3, BLOCK), 4, np.uint8))
    monkeypatch.undo()
    assert (records.read(numbers, sums, BLOCK) == 3).all()
    again = records.append(np.full((3, BLOCK), 5, np.uint8))
    assert (records.read(*again, BLOCK) == 5).all() and (records.read(numbers, sums, BLOCK) == 3).all()


def test_record_file_is_unnamed_and_needs_folder(tmp_path):
    Records(tmp_path / "new").append(np.zeros((1, BLOCK), np.uint8))
    assert not list((tmp_path / "new").iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        Records(tmp_path / "file")


def test_short_reads_are_continued(tmp_path, monkeypatch):
    records, read = Records(tmp_path), os.preadv
    new = np.random.default_rng(0).integers(0, 256, (9, BLOCK), np.uint8)
    numbers, sums = records.append(new)
    monkeypatch.setattr(os, "preadv", lambda file, into, at: read(file, [into[0][:3000]], at))
    np.testing.assert_array_equal(records.read(numbers, sums, BLOCK), new)


def test_record_numbers_fit_int32(tmp_path):
    assert (Records(tmp_path, most=1 << 50).most - 1) // BLOCK == np.iinfo(np.int32).max


def test_threads_share_one_record_file(tmp_path, monkeypatch):
    begin, found = Records.__init__, []

    def slowly(self: Records, *args: object) -> None:
        time.sleep(0.1)
        begin(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Records, "__init__", slowly)
    threads = [threading.Thread(target=lambda: found.append(host.records(str(tmp_path)))) for _ in range(4)]
    for x in threads:
        x.start()
    for x in threads:
        x.join()
    assert len(found) == 4 and len(set(map(id, found))) == 1


def test_raised_page_errors_hold_no_references():
    """Its frames hold caches; and other threads may fail meanwhile."""

    class Large:
        pass

    for error in (OSError(13, "of another", "records"), OSError(28, "No space left on device", "records")):
        host.FAILED.append(error)

    class Text(RuntimeError):
        def __str__(self) -> str:
            if host.FAILED[-1].errno != 5:
                host.FAILED.append(OSError(5, "another", "records"))
            return "in a program: [Errno 28] No space left on device: 'records'"

    def program() -> weakref.ref:
        large = Large()
        seen = weakref.ref(large)
        with contextlib.suppress(OSError), host.raise_page_errors():
            raise Text
        return seen

    with pytest.raises(OSError, match="No space left"), host.raise_page_errors():
        raise Text
    seen = program()
    gc.collect()
    assert seen() is None
