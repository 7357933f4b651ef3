"""The check from heads on disk to its report, with a fake engine in the engine's place."""

import json

import pytest
from gguf import GGMLQuantizationType, GGUFReader

from eval.serving.engine_check import check_engine, serving
from eval.serving.engine_process import EngineFailed
from eval.serving.environment import EngineUnavailable
from eval.serving.target_file import find_program
from eval.serving.vllm_engine import VllmEngine
from heads.export.eagle_writer import export_heads
from heads.identity import identify
from heads.layout import save_heads
from tests.eval.serving.engine_plan import EnginePlan
from tests.eval.serving.test_engine_process import alive, gone, started_pids
from tests.heads.gguf_target import write_target_gguf


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return EnginePlan(tmp_path_factory.mktemp("engine"))


@pytest.fixture
def plan(made, monkeypatch):
    monkeypatch.setenv("FAKE_ENGINE", str(made.folder / "plan.json"))
    return made


def test_vllm_that_does_the_same_passes(plan, tmp_path):
    plan.set(plan.answers[True])
    summary = check_engine(plan.config(tmp_path))
    assert summary["passed"], summary["failures"]
    assert summary["settings"]["version"] == "1.2.3"
    assert summary["engine"]["drafts"] == summary["own"]["drafts"] > 0
    assert json.loads((tmp_path / "report.json").read_text()) == summary
    assert "texts equal on 3 of 3 prompts, counters on 3 of 3" in (tmp_path / "report.md").read_text()
    asked = (tmp_path / "vllm-with-heads.log").read_text()
    assert "started with -m vllm.entrypoints.openai.api_server --model" in asked
    speculative = {"method": "eagle3", "model": str(tmp_path / "export-vllm"), "num_speculative_tokens": 3}
    assert f"--speculative-config {json.dumps(speculative)}" in asked
    assert "--speculative-config" not in (tmp_path / "vllm-without-heads.log").read_text()
    assert gone(started_pids(plan.folder))


def test_a_plain_server_that_runs_already_serves_several_checks(plan, tmp_path):
    plan.set(plan.answers[True])
    config = plan.config(tmp_path)
    engine = VllmEngine(plan.folder / "engine", config.model.path, heads=None, dtype="float32", max_context=64)
    with serving(config, engine, with_heads=False) as plain:
        for form in ("vllm", "speculators"):
            output = tmp_path / form
            summary = check_engine(plan.config(output, format=form), plain)
            assert summary["passed"], summary["failures"]
            assert summary["settings"]["format"] == form
            assert str(output / f"export-{form}") in (output / "vllm-with-heads.log").read_text()
            assert not (output / "vllm-without-heads.log").exists()
        first, *others = started_pids(plan.folder)
        assert alive([first]) == [first]
        assert len(others) == 2
        assert gone(others)
    assert gone([first])


def test_other_tokens_and_other_counts_fail_by_name(plan, tmp_path):
    answers = plan.copy_of_answers(True)
    first, second, _ = answers["with"]
    answers["with"][first]["tokens"][4] += 1
    answers["with"][second]["accepted"][0] += 1
    plan.set(answers)
    failures = {failure["name"]: failure["text"] for failure in check_engine(plan.config(tmp_path))["failures"]}
    assert set(failures) == {"engine_texts_differ", "counters_differ"}
    assert "on 1 of 3 prompts, first on p0 at token 4" in failures["engine_texts_differ"]
    assert "on 1 of 3 prompts, first on p1: vLLM" in failures["counters_differ"]


@pytest.mark.parametrize(
    ("fault", "message"),
    [("no tokens", "vLLM sent no token ids"), ("refuses", "answered /v1/completions with 400: the engine says no")],
)
def test_an_engine_that_does_not_answer_is_stopped(plan, tmp_path, fault, message):
    plan.set(plan.answers[True], fault)
    with pytest.raises(EngineFailed, match=message):
        check_engine(plan.config(tmp_path))
    assert len(started_pids(plan.folder)) == 2
    assert gone(started_pids(plan.folder))


def test_llama_cpp_converts_the_target_and_may_differ_a_little(plan, tmp_path):
    answers = plan.copy_of_answers(False)
    next(iter(answers["with"].values()))["tokens"][4] += 1
    plan.set(answers)
    summary = check_engine(plan.config(tmp_path, engine="llamacpp"))
    assert summary["passed"], summary["failures"]
    assert [note["name"] for note in summary["notes"]] == ["engine_texts_differ"]
    assert (summary["settings"]["version"], summary["settings"]["format"]) == ("b123", "llama.cpp")
    assert GGUFReader(tmp_path / "gguf" / "target.gguf").fields["llama.block_count"].contents() == 4
    converter = (tmp_path / "gguf" / "target.log").read_text()
    assert converter.startswith(f"{plan.folder / 'target'} --outtype f32 --outfile")
    asked = (tmp_path / "llamacpp-with-heads.log").read_text()
    heads = tmp_path / "export-llama.cpp" / "heads.gguf"
    assert f"--spec-type draft-eagle3 --spec-draft-model {heads}" in asked
    assert "--spec-draft-n-max 3" in asked
    weights = {tensor.tensor_type for tensor in GGUFReader(heads).tensors if tensor.name != "d2t"}
    assert weights == {GGMLQuantizationType.F32}  # the dtype of the target


def test_llama_cpp_takes_the_files_that_are_there(plan, tmp_path):
    plan.set(plan.answers[False])
    target_gguf = write_target_gguf(tmp_path / "target.gguf", plan.target)
    export_heads(plan.folder / "run" / "heads", tmp_path / "out", plan.target, "llama.cpp", target_gguf=target_gguf)
    for source in (tmp_path / "out", plan.folder / "run"):
        output = tmp_path / f"check-{source.name}"
        given = {"target_gguf": str(target_gguf), "converter": None, "source": str(source)}
        summary = check_engine(plan.config(output, engine="llamacpp", **given))
        assert summary["passed"], summary["failures"]
        asked = (output / "llamacpp-with-heads.log").read_text()
        heads = tmp_path / "out" if source.name == "out" else output / "export-llama.cpp"
        assert f"-m {target_gguf} " in asked
        assert f"--spec-draft-model {heads / 'heads.gguf'}" in asked
        assert not (output / "gguf").exists()


def test_what_llama_cpp_cannot_do_is_said(plan, tmp_path, random_heads):
    converter = tmp_path / "convert--fail.py"
    converter.write_text((plan.folder / "convert.py").read_text())
    message = r"refused .*target; the end of .*:\n  Model LlamaForCausalLM is not supported"
    with pytest.raises(ValueError, match=message):
        check_engine(plan.config(tmp_path / "a", engine="llamacpp", converter=str(converter)))
    save_heads(random_heads(plan.target), tmp_path / "medusa", identify(plan.target))
    with pytest.raises(ValueError, match=r"holds medusa heads, format=llama\.cpp takes eagle3 heads"):
        check_engine(plan.config(tmp_path / "b", engine="llamacpp", source=str(tmp_path / "medusa")))
    export_heads(plan.folder / "run" / "heads", tmp_path / "vllm", plan.target, "vllm")
    with pytest.raises(ValueError, match=r"vllm holds no heads\.gguf, from which llama\.cpp drafts; give the heads"):
        check_engine(plan.config(tmp_path / "c", engine="llamacpp", source=str(tmp_path / "vllm")))
    with pytest.raises(ValueError, match="target_gguf=nowhere does not exist; give the target's GGUF file"):
        check_engine(plan.config(tmp_path / "d", engine="llamacpp", target_gguf="nowhere"))


def test_tools_that_are_not_there(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EngineUnavailable, match="no llama-server on PATH; build it and give server=PATH"):
        find_program("llama-server", None, "server")
    with pytest.raises(ValueError, match="server=nowhere does not exist"):
        find_program("llama-server", "nowhere", "server")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engine": "onnx"}, "engine=onnx must be one of vllm, llamacpp"),
        ({"max_new_tokens": 1}, "max_new_tokens=1 must be at least 2"),
        ({"target_gguf": "t.gguf"}, "target_gguf=t.gguf is for engine=llamacpp, not for engine=vllm"),
        ({"format": "sglang"}, "format=sglang must be one of vllm, speculators with engine=vllm"),
        ({"format": "vllm", "engine": "llamacpp"}, "format=vllm must be .* and null with other engines"),
        ({"start_timeout_s": 0}, "start_timeout_s=0.0 must be above 0"),
        ({"model": {"name": "tiny", "path": "random:llama"}}, "model.path=random:llama lives in memory only"),
        ({"source": "nowhere"}, "heads=nowhere holds no config.json"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens=0 must be at least 1"),
        ({"max_new_tokens": 500}, "the context of tiny holds 512; lower max_new_tokens"),
    ],
)
def test_mistakes_are_answered_by_name(plan, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        check_engine(plan.config(tmp_path, **changes))
