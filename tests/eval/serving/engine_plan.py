"""A target and heads on disk, and a fake engine (`fake_engine`) that answers as our decoder does, or as told."""

import json
import sys
from pathlib import Path
from typing import Any

from eval.config import from_hydra
from eval.prompts import load_prompts
from eval.serving.check_config import ServeCheckConfig
from eval.serving.own_decoding import OwnDecoder
from eval.serving.served_heads import served_heads
from heads.eagle3 import Eagle3Config
from heads.identity import identify
from heads.layout import save_heads
from heads.target import TargetConfig, load_target
from heads.tiny import tiny_model_and_tokenizer
from tests.heads.gguf_target import write_target_gguf
from tests.heads.test_eagle import make

FAKE = Path(__file__).with_name("fake_engine.py")
CONVERTER = """
import sys
from pathlib import Path

if "--fail" in Path(sys.argv[0]).name:
    sys.exit("Model LlamaForCausalLM is not supported")
print(*sys.argv[1:])
outfile = Path(sys.argv[sys.argv.index("--outfile") + 1])
outfile.write_bytes(Path(sys.argv[0]).with_name("target.gguf").read_bytes())
"""
LIMIT = 10


class EnginePlan:
    """Files in `folder`: target/, run/heads, prompts.jsonl, plan.json, and the programs `engine` and `convert.py`."""

    def __init__(self, folder: Path):
        self.folder = folder
        model, tokenizer = tiny_model_and_tokenizer("llama")
        model.save_pretrained(folder / "target")
        tokenizer.save_pretrained(folder / "target")
        rows = [{"id": f"p{i}", "prompt": f"say {i}"} for i in range(3)]
        (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.target = load_target(TargetConfig("tiny", str(folder / "target"), dtype="float32"), "cpu")
        heads = make(self.target, Eagle3Config(taps=[0, 1, 2]))
        save_heads(heads, folder / "run" / "heads", identify(self.target))
        engine = folder / "engine"
        engine.write_text(f"#!{sys.executable} -SE\n{FAKE.read_text()}")
        engine.chmod(0o755)
        (folder / "convert.py").write_text(CONVERTER)
        write_target_gguf(folder / "target.gguf", self.target)
        self.answers = {True: self._answers(True), False: self._answers(False)}  # by drafts_past_end

    def _answers(self, past_end: bool) -> dict[str, dict[str, Any]]:
        """What our decoder answers, by heads and prompt."""
        served = served_heads(str(self.folder / "run"), self.target, None, self.folder / "expected")
        prompts = load_prompts([str(self.folder / "prompts.jsonl")], self.target)
        decoder = OwnDecoder(self.target, served, prompts, LIMIT, past_end)
        found: dict[str, dict[str, Any]] = {"with": {}, "without": {}}
        for prompt in prompts:
            key, drafted = " ".join(map(str, prompt.ids)), decoder.answer(prompt.ids, with_heads=True)
            assert drafted.counters is not None
            counted = {"drafts": drafted.counters.drafts, "accepted": drafted.counters.accepted_per_position}
            found["with"][key] = {"tokens": drafted.tokens, **counted}
            found["without"][key] = {"tokens": decoder.answer(prompt.ids, with_heads=False).tokens}
        return found

    def copy_of_answers(self, past_end: bool) -> dict[str, dict[str, Any]]:
        return json.loads(json.dumps(self.answers[past_end]))

    def set(self, answers: dict[str, Any], fault: str | None = None) -> None:
        """What the next engines do; `FAKE_ENGINE` must name the file."""
        (self.folder / "pids").unlink(missing_ok=True)
        plan = {"answers": answers, "fault": fault, "log": [], "pids": str(self.folder / "pids")}
        (self.folder / "plan.json").write_text(json.dumps(plan))

    def settings(self, output: Path, **changes: Any) -> dict[str, Any]:
        return {
            "model": {"name": "tiny", "path": str(self.folder / "target"), "dtype": "float32"},
            "source": str(self.folder / "run"),
            "prompts": [str(self.folder / "prompts.jsonl")],
            "max_new_tokens": LIMIT,
            "python": str(self.folder / "engine"),
            "server": str(self.folder / "engine"),
            "converter": str(self.folder / "convert.py"),
            "output": str(output),
            "start_timeout_s": 60,
            **changes,
        }

    def config(self, output: Path, **changes: Any) -> ServeCheckConfig:
        return from_hydra(ServeCheckConfig, self.settings(output, **changes))
