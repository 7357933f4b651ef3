"""One of two processes is killed: the other does not wait for it, and one alone goes on from the last checkpoint."""

import time

import pytest

from tests.faults.launched import KILL, launch_with
from tests.train.test_distributed import assert_same_rows
from train import checkpoint
from train.loop import train

SETTINGS = ("data.packing=false", "trainer.batch_size=8", "trainer.save_every=2")


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["ddp", "fsdp2"])
def test_a_rank_that_dies_ends_the_run_and_one_process_goes_on(launcher, make_config, make_values, tmp_path):
    train(make_config(*SETTINGS, f"output_dir={tmp_path}/one"))
    began = time.monotonic()
    code, said = launch_with(KILL, launcher, make_values(*SETTINGS), tmp_path)
    seconds = time.monotonic() - began
    assert code not in (0, None)
    assert seconds < 200, "the other process waited for the dead one"
    assert "Signal 9 (SIGKILL)" in said
    (found,) = checkpoint.checkpoints(tmp_path / "run" / "checkpoints")
    assert checkpoint.damage(found) is None
    assert checkpoint.read_state(found).step == 2
    train(make_config(*SETTINGS, "resume=true"))
    assert_same_rows(tmp_path / "one", tmp_path / "run")
