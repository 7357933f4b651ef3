"""Row layouts, sources, and rows that cannot be used."""

import gzip
import json

import datasets
import pytest

import data.sources
from data.conversations import Conversation, load_conversations, read_conversations
from data.problems import Problems, RowError
from data.sources import source_files

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
GOOD = {"messages": [USER, ANSWER]}


def write(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def read_one(tmp_path, row, **options):
    (conversation,) = load_conversations([write(tmp_path / "one.jsonl", [row])], **options)
    return conversation


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        (GOOD, [USER, ANSWER]),
        (
            {
                "conversations": [
                    {"from": "system", "value": "Be brief"},
                    {"from": "human", "value": "Hi"},
                    {"from": "gpt", "value": "Hello"},
                    {"from": "tool", "value": ""},
                ]
            },
            [{"role": "system", "content": "Be brief"}, USER, ANSWER, {"role": "tool", "content": ""}],
        ),
        ({"conversations": [USER, ANSWER]}, [USER, ANSWER]),
        ({"prompt": "Hi", "response": "Hello"}, [USER, ANSWER]),
        ({"prompt": "Hi", "completion": "Hello", "response": None}, [USER, ANSWER]),
        ({"prompt": "unused", "messages": [USER, ANSWER]}, [USER, ANSWER]),
        (
            {
                "messages": [
                    {"role": "developer", "content": "Be brief"},
                    {
                        "role": "user",
                        "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}],
                    },
                    {"role": "assistant", "content": None, "tool_calls": [{"id": 1}], "name": None},
                    {"role": "tool", "content": "4", "tool_call_id": "1"},
                ]
            },
            [
                {"role": "developer", "content": "Be brief"},
                USER,
                {"role": "assistant", "content": "", "tool_calls": [{"id": 1}]},
                {"role": "tool", "content": "4", "tool_call_id": "1"},
            ],
        ),
    ],
)
def test_layouts(tmp_path, row, messages):
    assert read_one(tmp_path, row).messages == messages


def test_category_id_tools_and_origin(tmp_path):
    row = {**GOOD, "category": "maths", "id": 7, "tools": [{"type": "function"}]}
    conversation = read_one(tmp_path, row)
    origin = f"{tmp_path / 'one.jsonl'}:1"
    assert conversation == Conversation([USER, ANSWER], "maths", origin, "7", [{"type": "function"}])


def test_prompts_need_no_answer(tmp_path):
    assert read_one(tmp_path, {"prompt": "Hi"}, needs_answer=False).messages == [USER]
    with pytest.raises(ValueError, match="no assistant turn: 1"):
        read_one(tmp_path, {"prompt": "Hi"})


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{'no': json", r"bad.jsonl:2: invalid JSON: "),
        ([1], "the row is not an object: list"),
        ({"text": "Hi"}, r"no conversations, messages or prompt: the row has \['text'\]"),
        ({"messages": []}, "messages must be a list of at least one turn"),
        ({"conversations": "Hi"}, "conversations must be a list of at least one turn"),
        ({"messages": ["Hi"]}, "a turn is not an object: str"),
        ({"messages": [{"role": "robot", "content": "Hi"}]}, "unknown role 'robot': use one of user, human"),
        ({"messages": [{"content": "Hi"}]}, "unknown role None"),
        ({"messages": [USER, {"role": "assistant", "content": " "}]}, "empty assistant turn"),
        ({"prompt": ""}, "empty user turn"),
        ({"prompt": 7}, "content is neither text nor a list of parts: int"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "content holds a part that is not text",
        ),
        ({"prompt": "Hi", "response": "a", "completion": "b"}, "both response and completion"),
        ({**GOOD, "tools": "[]"}, "tools must be a list of function schemas"),
        ({"messages": [USER]}, "no assistant turn"),
    ],
)
def test_bad_rows_are_counted_and_too_many_stop_the_run(tmp_path, row, reason):
    source = write(tmp_path / "bad.jsonl", [GOOD, row, GOOD])
    problems = Problems()
    assert len(list(read_conversations(source, problems))) == 2
    assert problems.num_rows == 3
    assert problems.counts.total() == 1
    problems.check(0.4)
    with pytest.raises(ValueError, match=r"1 of 3 rows \(33.3%\) cannot be used, more than max_bad_share=0.01; mend"):
        problems.check(0.01)
    with pytest.raises(ValueError, match=reason):
        problems.check(0.01)


def test_only_the_first_examples_are_shown():
    problems = Problems(num_shown=2, num_rows=4)
    for line in range(4):
        problems.add(f"f:{line}", RowError("bad", f"detail {line}"))
    with pytest.raises(ValueError, match=r"\(bad: 4\). The first are:\n  f:0: bad: detail 0\n  f:1: bad: detail 1$"):
        problems.check(0.5)


def test_blank_lines_do_not_count(tmp_path):
    source = write(tmp_path / "blank.jsonl", [GOOD, "", GOOD])
    origins = [conversation.origin for conversation in load_conversations([source])]
    assert origins == [f"{source}:1", f"{source}:3"]


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "json", "parquet", "saved", "saved_dict", "repository", "hub"])
def test_every_kind_of_source_gives_the_same_rows(tmp_path, kind, monkeypatch):
    rows = [{"messages": [USER, ANSWER], "category": str(i)} for i in range(3)]
    table = datasets.Dataset.from_list(rows)
    path = tmp_path / f"rows.{kind}"
    source = str(path)
    if kind == "jsonl":
        write(path, rows)
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    elif kind == "json":
        path.write_text(json.dumps(rows))
    elif kind == "parquet":
        table.to_parquet(path)
    elif kind == "saved":
        table.save_to_disk(path)
    elif kind == "saved_dict":
        datasets.DatasetDict(train=table.select([0]), extra=table).save_to_disk(path)
        source += ":extra"
    elif kind == "repository":
        path.mkdir()
        write(path / "train.jsonl", rows)
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    else:
        asked = []
        monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: asked.append((a, k)) or table)
        source = "hub:owner/name@all:test"
    conversations = load_conversations([source])
    assert [conversation.messages for conversation in conversations] == [[USER, ANSWER]] * 3
    assert [conversation.category for conversation in conversations] == ["0", "1", "2"]
    assert conversations[1].origin == (f"{source}:2" if "jsonl" in kind else f"{source}[1]")
    if kind == "hub":
        assert asked == [(("owner/name", "all"), {"split": "test"})]
        with pytest.raises(ValueError, match="held in memory only"):
            source_files(source)
    else:
        split, files = source_files(source)
        assert split == {"saved": "train", "saved_dict": "extra", "repository": "train"}.get(kind, "")
        assert files
        assert all(file.is_file() for file in files.values())


def test_hub_defaults(monkeypatch):
    asked = []
    table = datasets.Dataset.from_list([GOOD])
    monkeypatch.setattr(data.sources.datasets, "load_dataset", lambda *a, **k: asked.append((a, k)) or table)
    load_conversations(["hub:owner/name"])
    assert asked == [(("owner/name", None), {"split": "train"})]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.jsonl", None, "is neither a file nor a folder; give a path that exists"),
        ("empty.jsonl", b"", "is empty; give a source with at least one conversation"),
        ("empty.json", b"[]", "is empty; give a source"),
        ("object.json", b"{}", "must hold one JSON list of rows, got dict"),
        ("lines.json", b"{}\n{}\n", "lines.json: invalid JSON: .*belongs in a .jsonl file"),
        ("rows.csv", b"a,b", "must end in one of .jsonl, .jsonl.gz, .json, .parquet; rename or convert it"),
        ("cut.jsonl.gz", gzip.compress(json.dumps(GOOD).encode() * 99, mtime=0)[:40], "is not a whole gzip file"),
    ],
)
def test_unusable_sources(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_conversations([str(tmp_path / name)])


def test_unknown_split(tmp_path):
    datasets.DatasetDict(train=datasets.Dataset.from_list([GOOD])).save_to_disk(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"split 'test' is not in .*; use one of \['train'\]"):
        load_conversations([f"{tmp_path / 'saved'}:test"])


def test_limit_spans_sources(tmp_path):
    sources = [write(tmp_path / f"{i}.jsonl", [GOOD] * 3) for i in range(2)]
    assert len(load_conversations(sources, limit=4)) == 4
    assert len(load_conversations(sources)) == 6


def test_system_prompt_is_put_first_unless_there_is_one(tmp_path):
    conversation = read_one(tmp_path, GOOD)
    system = {"role": "system", "content": "Be brief"}
    assert conversation.with_system(None) is conversation
    with_system = conversation.with_system("Be brief")
    assert with_system.messages == [system, USER, ANSWER]
    assert with_system.with_system("Be long") is with_system
