"""Files of texts: what is understood, what is refused, and how they are cut."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_spac.errors import ConfigError
from vllm_spac.tools.evaluation import prompts


def file_of(tmp_path: Path, content: str | bytes) -> Path:
    path = tmp_path / "texts"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        ('{"text": "a b"}\n\n{"prompt": "c\\nd", "id": 3}\n', ["a b", "c\nd"]),
        ('{"prompt_token_ids": [1, 0]}\n{"text": "e\u2028f"}', [[1, 0], "e\u2028f"]),
        ("one\ntwo\n\n \n\nthree\n", ["one\ntwo", "three"]),
        ("one\n\ntwo\0three\0\0", ["one\n\ntwo", "three"]),
        ('\ufeff{"text": "x"}\n{"text": " "}', ["x"]),
    ],
)
def test_understood(tmp_path: Path, content: str, texts: list) -> None:
    assert prompts.read(file_of(tmp_path, content)) == texts


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "holds no text"),
        ("\n \n\0", "holds no text"),
        (b"\xff\xfe", "UTF-8"),
        ('{"text": "a"}\n{"text": ', "line 2 is not JSON"),
        ('{"text": "a"}\nplain', "line 2 is not JSON"),
        ('{"txt": "a"}', "exactly one of"),
        ('{"text": "a", "prompt": "b"}', "exactly one of"),
        ('{"text": "a"}\n[1]', "line 2 must have"),
        ('{"text": 3}', "must be a string"),
        ('{"prompt_token_ids": [1, -1]}', "integers from 0"),
        ('{"prompt_token_ids": [true]}', "integers from 0"),
    ],
)
def test_refused(tmp_path: Path, content: str | bytes, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        prompts.read(file_of(tmp_path, content))


def encode(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def test_long_texts_are_cut_and_no_token_is_lost() -> None:
    pieces = prompts.tokens(["abcdefgh", [1, 2, 3]], encode, 4)
    assert pieces == [encode("abcd"), encode("efgh"), [1, 2, 3]]


@pytest.mark.parametrize(("limit", "lengths"), [(3, [3]), (4, [4]), (5, [4]), (6, [4, 2]), (99, [4, 4, 3])])
def test_the_limit_holds(limit: int, lengths: list[int]) -> None:
    assert [len(piece) for piece in prompts.tokens(["abcdefgh", [1, 2, 3]], encode, 4, limit)] == lengths


def test_nothing_left_is_refused() -> None:
    with pytest.raises(ConfigError, match="too short"):
        prompts.tokens(["a", "b"], encode, 4)


def test_checksum_changes_with_any_token() -> None:
    names = {prompts.checksum(pieces) for pieces in ([[1, 2]], [[1], [2]], [[1, 3]], [[1, 2], [3]])}
    assert len(names) == 4
