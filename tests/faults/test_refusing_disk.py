"""A disk that is full or read-only: the message says which file, why and what to do; what was there stays."""

import errno
import os

from tests.faults.harness import full_beyond, full_from, read_only, run_fork
from tests.faults.writers import WRITERS, each_writer, for_each_change, for_each_size

FULL, TOO_LARGE, READ_ONLY = (os.strerror(number) for number in (errno.ENOSPC, errno.EFBIG, errno.EROFS))


def check_refusal(writer, root, ended, reason):
    """The last line says it all; the writer keeps what there was, and succeeds once the disk takes it."""
    said = ended.said.splitlines()[-1]
    assert ended.code == 1
    assert reason in said
    assert str(root) in said
    assert writer.then in said
    assert "could not be written (" in said or not writer.then
    assert writer.read(root) in ((1, 2, None) if writer.may_lack and writer.then else (1, 2))
    writer.write(root, 2)
    assert writer.read(root) == 2


@each_writer
def test_a_full_disk_costs_nothing_and_says_what_to_do(name, tmp_path):
    """Full from the n-th change of a file on, for every n until the write succeeds."""
    writer, refused = WRITERS[name], 0
    for root, ended in for_each_change(writer, tmp_path, full_from):
        check_refusal(writer, root, ended, FULL)
        refused += 1
    assert refused


@each_writer
def test_a_disk_that_fills_amid_a_write_too(name, tmp_path):
    writer, refused = WRITERS[name], 0
    for root, ended in for_each_size(writer, tmp_path, full_beyond):
        if ended.code:
            refused += 1
            check_refusal(writer, root, ended, TOO_LARGE)
    assert refused


@each_writer
def test_a_read_only_disk_is_named(name, tmp_path):
    writer = WRITERS[name]
    writer.write(tmp_path, 1)
    check_refusal(writer, tmp_path, run_fork(lambda: writer.write(tmp_path, 2), read_only), READ_ONLY)
