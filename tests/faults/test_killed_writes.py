"""Killed at each change of a file and amid its bytes, a writer leaves the old or the new, and the next one succeeds."""

from tests.faults.harness import KILLED, TORN, kill_at, torn_at
from tests.faults.writers import WRITERS, each_writer, for_each_change, for_each_size

FEWEST = {"answers": 1, "report": 2, "metrics": 2}  # changes of a file; the others make more than five


def check_after_a_kill(writer, root):
    found = writer.read(root)
    assert found in (1, 2) or (found is None and writer.may_lack)
    writer.write(root, 2)
    assert writer.read(root) == 2


@each_writer
def test_killed_at_each_change_of_a_file(name, tmp_path):
    writer, changes = WRITERS[name], 0
    for root, ended in for_each_change(writer, tmp_path, kill_at):
        assert ended.code == KILLED, ended.said
        check_after_a_kill(writer, root)
        changes += 1
    assert changes >= FEWEST.get(name, 6)


@each_writer
def test_killed_amid_a_write(name, tmp_path):
    writer, torn = WRITERS[name], 0
    for root, ended in for_each_size(writer, tmp_path, torn_at):
        assert ended.code in (0, TORN), ended.said
        torn += ended.code == TORN
        check_after_a_kill(writer, root)
    assert torn
