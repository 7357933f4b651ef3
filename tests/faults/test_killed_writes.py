"""Killed at each change of a file and amid its bytes, a writer leaves the old or the new, and the next one succeeds."""

import itertools

from tests.faults.harness import KILLED, TORN, kill_at, run_fork, torn_at
from tests.faults.writers import WRITERS, each_writer

FEWEST = {"answers": 1, "report": 2, "metrics": 2}  # changes of a file; the others make more than five
SIZES = (0, 1, 100, 1000, 3000)


def left(root):
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def check_after_a_kill(writer, root):
    found = writer.read(root)
    assert found in (1, 2) or (found is None and writer.may_lack)
    writer.write(root, 2)
    assert writer.read(root) == 2


@each_writer
def test_killed_at_each_change_of_a_file(name, tmp_path):
    writer = WRITERS[name]
    for call in itertools.count():
        root = tmp_path / str(call)
        root.mkdir()
        writer.write(root, 1)
        ended = run_fork(lambda root=root: writer.write(root, 2), kill_at(call))
        if ended.code == 0:
            break
        assert ended.code == KILLED, ended.said
        check_after_a_kill(writer, root)
    assert call >= FEWEST.get(name, 6)


@each_writer
def test_killed_amid_a_write(name, tmp_path):
    writer, torn = WRITERS[name], 0
    for size in SIZES:
        root = tmp_path / str(size)
        root.mkdir()
        writer.write(root, 1)
        ended = run_fork(lambda root=root: writer.write(root, 2), torn_at(size))
        assert ended.code in (0, TORN), ended.said
        torn += ended.code == TORN
        check_after_a_kill(writer, root)
    assert torn
