"""The command, with a server in place of a target: the same file, whether it runs through or is killed in the midst."""

import json
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

import scripts.regenerate
from data.render import render_prompt
from eval.batched import generate_batch
from eval.config import from_hydra
from eval.sampling import SamplingConfig
from heads.target import TargetConfig, load_target, load_tokenizer
from heads.tiny import SHAPE, tiny_model_and_tokenizer
from scripts.regenerate import RegenerateConfig, regenerate
from tests.eval.serving.faulty_server import FaultyServer

ROOT = Path(__file__).parents[2]
MODEL = {"name": "tiny", "path": "random:llama"}


def serving(target):
    """The body of vLLM's answer to a greedy request, said by a target of ours."""

    def whole(body):
        ids = render_prompt(body["messages"], target.tokenizer, {})
        (said,) = generate_batch(target, [ids], SamplingConfig(), body["max_tokens"], [0])
        finish = "stop" if said[-1] in target.eos_ids else "length"
        choice = {"message": {"content": target.tokenizer.decode(said)}, "finish_reason": finish, "token_ids": said}
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(said)}
        return {"choices": [choice], "prompt_token_ids": ids, "usage": usage}

    return whole


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"id": f"p{i}", "prompt": f"say {i}"}) + "\n" for i in range(6)))
    return path


def rows_of(path) -> list[dict]:
    return sorted((json.loads(line) for line in path.read_text().splitlines()), key=lambda row: row["id"])


def test_a_server_gives_the_file_that_the_target_gives(tiny_target, prompts, tmp_path, monkeypatch, capsys):
    asked = {"model": MODEL, "prompts": [str(prompts)], "max_new_tokens": 12}
    regenerate(from_hydra(RegenerateConfig, {**asked, "output": str(tmp_path / "here.jsonl")}))
    here = capsys.readouterr().out
    monkeypatch.setattr(scripts.regenerate, "load_target", None)  # the weights stay where they are
    with FaultyServer(whole=serving(tiny_target())) as server:
        there = {**asked, "output": str(tmp_path / "there.jsonl"), "url": f"{server.url}/v1"}
        regenerate(from_hydra(RegenerateConfig, there))
    assert rows_of(tmp_path / "there.jsonl") == rows_of(tmp_path / "here.jsonl")
    last = "6 answers, 72 tokens in "
    assert f"{last}{tmp_path / 'here.jsonl'}\n" in here
    assert f"{last}{tmp_path / 'there.jsonl'}\n" in capsys.readouterr().out


def test_the_file_of_settings_composes():
    with initialize_config_dir(version_base="1.3", config_dir=str(ROOT / "conf")):
        composed = compose("regenerate", overrides=["output=a.jsonl", "prompts=[b]", "url=http://x", "concurrency=4"])
    config = from_hydra(RegenerateConfig, composed)
    defaults = RegenerateConfig(model=config.model, output="a.jsonl", prompts=["b"])
    assert (config.retry, config.timeout_s, config.max_failed_share) == (
        defaults.retry,
        defaults.timeout_s,
        defaults.max_failed_share,
    )
    assert config.concurrency == 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"invent": 5}, "invent=5 .* chat completions cannot send; invent without url= first"),
        ({"invent_like": ["b"]}, "invent_like=.* is for invented prompts; say how many: invent=1000"),
        ({"shots": 0}, "shots=0 must be at least 1"),
        ({"concurrency": 0}, "concurrency=0 must be at least 1"),
        ({"timeout_s": 0}, "timeout_s=0.0 must be above 0"),
        ({"max_failed_share": 1}, r"max_failed_share=1.0 must be in \[0, 1\)"),
        ({"extra_body": {"seed": 1}}, "extra_body.seed is set by other settings"),
    ],
)
def test_mistakes_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        from_hydra(RegenerateConfig, {"model": MODEL, "output": "a", "prompts": ["b"], "url": "http://x", **settings})


def test_a_dead_server_says_what_is_there_already(prompts, tmp_path):
    settings = {"model": MODEL, "prompts": [str(prompts)], "output": str(tmp_path / "a.jsonl"), "concurrency": 1}
    retry = {"attempts": 1, "first_wait_s": 0.0}

    def whole(body):
        return {"choices": [{"message": {"content": "so"}, "finish_reason": "stop"}], "usage": {"completion_tokens": 3}}

    with (
        FaultyServer({2: "die"}, whole=whole) as server,
        pytest.raises(ValueError, match=r"takes no connections .* run again to go on: 2 answers, 6 tokens in"),
    ):
        regenerate(from_hydra(RegenerateConfig, {**settings, "url": server.url, "retry": retry}))


@pytest.mark.parametrize("declares", [True, False])
def test_a_tokenizer_alone_is_that_of_the_target(tmp_path, declares):
    model, tokenizer = tiny_model_and_tokenizer("llama")
    if declares:
        model.generation_config.eos_token_id = [256, SHAPE["eos_token_id"]]
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    if not declares:
        (tmp_path / "generation_config.json").unlink()
    config = TargetConfig("tiny", str(tmp_path))
    target = load_target(config, "cpu")
    (tmp_path / "model.safetensors").unlink()
    alone, eos_ids = load_tokenizer(config)
    assert eos_ids == target.eos_ids == ((256, 258) if declares else (258,))
    assert alone.get_vocab() == target.tokenizer.get_vocab()
    with pytest.raises(ValueError, match="neither a model directory nor"):
        load_tokenizer(TargetConfig("none", str(tmp_path / "none")))
