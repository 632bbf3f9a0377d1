"""The rows of a data folder: data/rows.py."""

import pytest

from data.rows import UserError, held_out, read_jsonl, read_rows, write_jsonl

MISTAKES = {
    b'{"id": 1}': "line 1: 'prompt' is missing, or no string",
    b'\n{"prompt": []}': "line 2: 'prompt' .* docs/manual.md .* chats",
    b'{"prompt": ""}\n\xff': "line 2: .* in UTF-8",
    b"[]": "line 1: not an object",
    b'{\n"prompt": ""}': "line 1: .* write one JSON object on each line",
    b"": "too few prompts for train",
}


def test_a_mistake_is_named_with_file_and_line(tmp_path):
    path = tmp_path / "prompts_train.jsonl"
    for data, message in MISTAKES.items():
        path.write_bytes(data)
        with pytest.raises(UserError, match=f"prompts_train.jsonl.*{message}"):
            read_rows(tmp_path, "prompts", "train")
    path = tmp_path / "sft_train.jsonl"  # a label is an answer's: prompts may have their own
    write_jsonl(path, [{"prompt": x, "completion": "", "label": False} for x in "ab"])
    with pytest.raises(UserError, match='sft_train.jsonl, line 1: "label" is false'):
        read_rows(tmp_path, "sft", "train")
    path.rename(tmp_path / "prompts_train.jsonl")
    assert read_rows(tmp_path, "prompts", "val")[0]["label"] is False


def test_odd_text_survives_writing_and_reading(tmp_path):
    path = tmp_path / "new" / "folder" / "x.jsonl"
    rows = [{"a": "é\u2028\x85 \n"}, {"a": "\ud83d", "label": 0}]
    write_jsonl(path, rows)
    data = path.read_bytes()
    assert "é\u2028".encode() in data
    for text in (data, b"\xef\xbb\xbf" + data.replace(b"\n", b"\r\n")):
        path.write_bytes(text)
        assert read_jsonl(path) == rows


def test_a_hash_holds_out_one_prompt_in_twenty():
    prompts = [str(i) for i in range(1000)]
    assert len(held_out(prompts)) == 55
    assert held_out(prompts[:40]) == held_out(prompts[39::-1]) == {"39"}
    assert held_out(["\ud83d", "b", "c"]) == {"c"}  # at least one
    assert held_out(["39", "51"]) == {"51"}  # never all


def test_other_files_replace_missing_ones(tmp_path):
    def read(task):
        return [read_rows(tmp_path, task, split) for split in ("train", "val")]

    sft = [{"prompt": "39", "completion": "a"}, {"prompt": "9", "completion": "b", "id": 7}]
    write_jsonl(tmp_path / "sft_train.jsonl", sft)
    assert read("sft") == [sft[1:], sft[:1]]
    assert read("prompts") == [sft[1:], sft[:1]]  # with all that the rows say
    with pytest.raises(UserError, match="pref_train.jsonl: No such file"):
        read("pref")
    pairs = [{"prompt": x, "chosen": "c", "rejected": "d"} for x in ("5", "39", "5")]
    write_jsonl(tmp_path / "pref_train.jsonl", pairs)
    assert read("prompts") == [pairs[2:], pairs[1:2]]  # each prompt once
    (tmp_path / "sft_train.jsonl").unlink()
    assert read("sft")[1] == [{"prompt": "39", "completion": "c"}]
    write_jsonl(tmp_path / "pref_val.jsonl", pairs[:1])
    assert read("pref") == [pairs, pairs[:1]]
