"""Evaluation prompts are those that serving would send, spread over their categories."""

import json

from data.regenerate import Prompt
from eval.prompts import in_turn, load_prompts


def test_categories_take_turns():
    prompts = [Prompt(name, name[0], []) for name in ("a1", "a2", "a3", "b1", "c1", "c2")]
    assert [prompt.name for prompt in in_turn(prompts, None)] == ["a1", "b1", "c1", "a2", "c2", "a3"]
    assert [prompt.name for prompt in in_turn(prompts, 4)] == ["a1", "b1", "c1", "a2"]


def test_tools_reach_the_chat_template(monkeypatch, tmp_path, tiny_target):
    tool = {"type": "function", "function": {"name": "clock", "description": "tells the time", "parameters": {}}}
    rows = [{"id": "one", "prompt": "What time is it?", "tools": [tool]}, {"id": "two", "prompt": "Hello"}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = []
    monkeypatch.setattr(
        "data.regenerate.render_prompt", lambda messages, tokenizer, options: given.append(options) or [1]
    )
    load_prompts([str(tmp_path / "prompts.jsonl")], tiny_target())
    assert given == [{"tools": [tool]}, {}]
