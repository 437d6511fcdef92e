"""What several agents ask, bit for bit, from ``recorded.json``: texts of this repository, and the sizes of turns.

    python benchmarks/agents/recorded.py    # records it anew, from the texts in the tree: then these are other requests

All agents share a prefix, of tools' schemas and of files. Each turn adds a tool's result and asks for an answer: a call
of a tool, by a JSON schema, or text. The next turn's prompt has *recorded* text in place of what an engine answered, so
that all engines read the same. Every agent has the same turns, each beginning with another.

Texts are drawn by a hash, not by a generator: the same in each version of Python.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, Self

import xxhash
from tokenizers import Tokenizer

from benchmarks.common import ROOT, PlanError
from benchmarks.shapes import routing

FILE = Path(__file__).with_name("recorded.json")
AGENTS = 16  # at most
_SOURCES = {  # kind of text -> files whose paragraphs are recorded, and how many of them
    "files": (("vllm_spac/core.py", "vllm_spac/runtime.py", "vllm_spac/cache/residency.py"), 24),
    "results": (("tests/unit/floor_plan.py", "benchmarks/common.py", "vllm_spac/USAGE.md", "CONTRIBUTING.md"), 24),
    "answers": (("vllm_spac/EXACTNESS.md", "vllm_spac/README.md"), 12),
}
_SHORTEST, _LONGEST = 120, 700  # characters of a paragraph
PREFIX = 10_000  # tokens
TURNS = (  # tokens of a tool's result and of the answer, and whether that is a call
    (1_000, 20, True),
    (4_500, 60, True),
    (2_000, 180, False),
    (8_000, 400, False),
)
SCHEMA = {
    "type": "object",
    "properties": {
        "tool": {"enum": ["read_file", "search", "run"]},
        "path": {"type": "string"},
        "lines": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["tool", "path", "lines"],
}


@dataclass(frozen=True)
class Request:
    """One turn of an agent: the whole prompt, tokens of the answer at most, and the schema that it must follow."""

    ids: list[int]
    tokens: int
    schema: dict[str, Any] | None

    @property
    def line(self) -> dict:
        """Returns it for a line of JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Recording:
    """The recorded texts and sizes; ``scale``, ``answers``: what sizes of prompts and of answers are multiplied by."""

    seed: int
    prefix: int
    turns: list[tuple[int, int, bool]]
    schema: dict[str, Any]
    texts: dict[str, list[str]]
    scale: float = 1.0
    answers: float = 1.0

    @classmethod
    def read(cls, scale: float = 1.0, answers: float = 1.0, path: Path = FILE) -> Self:
        """Reads a recording.

        Raises:
            PlanError: a scale is not positive.
        """
        if min(scale, answers) <= 0:
            raise PlanError("--scale and --answer-scale are positive, e.g. 0.125")
        found = json.loads(path.read_text(encoding="utf-8"))
        turns = [(result, answer, call) for result, answer, call in found.pop("turns")]
        return cls(turns=turns, scale=scale, answers=answers, **found)

    @classmethod
    def fitting(cls, context: int) -> Self:
        """Returns the recording at the largest scale, of 1, 1/2 to 1/256, whose turns have ``context`` tokens at most.

        Raises:
            PlanError: there is none.
        """
        for halvings in range(9):
            if (found := cls.read(0.5**halvings, 0.5**halvings)).context <= context:
                return found
        raise PlanError(f"agents do not fit into {context} tokens; use a model with a longer context")

    @property
    def context(self) -> int:
        """Tokens that the longest prompt and its answer have."""
        return self._prompt(self.prefix) + sum(self._prompt(turn[0]) + self._answer(turn[1]) for turn in self.turns)

    def prefix_of(self, model: Path, run: int) -> list[int]:
        """Returns the tokens that all agents of a run share; no two runs share any, which a prefix cache would find."""
        return _Words.of(model, self)("files", ("run", run), 0, self._prompt(self.prefix))

    def agents(self, model: Path, agents: int, run: int) -> list[list[Request]]:
        """Returns the turns of each agent, for the model in the folder ``model``; ``run``: the number of a run.

        Raises:
            PlanError: so many are not recorded.
        """
        if not 1 <= agents <= AGENTS:
            raise PlanError(f"{agents} agents: from 1 to {AGENTS} are recorded")
        prefix = self.prefix_of(model, run)
        return [list(self._turns(_Words.of(model, self), prefix, agent, run)) for agent in range(agents)]

    def _turns(self, words: _Words, prefix: list[int], agent: int, run: int) -> Iterator[Request]:
        said, first = prefix, agent % len(self.turns)
        for turn, (result, answer, call) in enumerate(self.turns[first:] + self.turns[:first]):
            name, tokens = ("run", run, "agent", agent, "turn", turn), self._answer(answer)
            said = said + words("results", name, 1 + agent, self._prompt(result))
            yield Request(said, tokens, self.schema if call and words.has_text else None)
            said = said + words("answers", name, 1 + agent, tokens)

    def _prompt(self, tokens: int) -> int:
        return max(8, round(tokens * self.scale))

    def _answer(self, tokens: int) -> int:
        return max(2, round(tokens * self.answers))

    def describe(self, model: Path) -> dict:
        """Returns facts for a result that show whether two runs asked the same."""
        asked = [[request.line for request in turns] for turns in self.agents(model, AGENTS, 0)]
        digest = xxhash.xxh3_64_hexdigest(json.dumps(asked).encode())
        return {"scale": self.scale, "answer_scale": self.answers, "context": self.context, "xxh3_64": digest}


class _Words:
    """Tokens of recorded texts for one model; drawn ones where it has no tokenizer."""

    def __init__(self, recording: Recording, encode: Callable[[str], list[int]] | None, vocabulary: int, shape: bool):
        self._recording, self._vocabulary, self._shape = recording, vocabulary, shape
        self._encode = encode

    @classmethod
    def of(cls, model: Path, recording: Recording) -> Self:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        vocabulary = config.get("vocab_size") or config["text_config"]["vocab_size"]
        encode = _encoder(model / "tokenizer.json") if (model / "tokenizer.json").is_file() else None
        return cls(recording, encode, vocabulary, (model / routing.FILE).is_file())

    @property
    def has_text(self) -> bool:
        return self._encode is not None

    def __call__(self, kind: str, name: tuple, stream: int, length: int) -> list[int]:
        """Returns ``length`` tokens that begin with ``name``; ``stream``: whose routing they follow in a shape."""
        if self._encode is None:
            drawn = [self._draw((kind, *name, place), self._vocabulary) for place in range(length)]
            return routing.ids_of(stream, drawn, self._vocabulary) if self._shape else drawn
        texts, ids = self._recording.texts[kind], list(self._encode(" ".join(map(str, name)) + "\n"))
        for place in count():
            if len(ids) >= length:
                return ids[:length]
            ids += self._encode(texts[self._draw((kind, *name, place), len(texts))])
        raise AssertionError("texts do not end")

    def _draw(self, name: tuple, below: int) -> int:
        return xxhash.xxh3_64_intdigest(json.dumps([self._recording.seed, *name]).encode()) % below


@cache
def _encoder(file: Path) -> Callable[[str], list[int]]:
    tokenizer = Tokenizer.from_file(str(file))

    @cache
    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    return encode


def record() -> dict[str, Any]:
    """Returns a recording of the texts in the tree: paragraphs, spread evenly over their files."""
    texts = {}
    for kind, (names, most) in _SOURCES.items():
        found = [text for name in names for text in (ROOT / name).read_text(encoding="utf-8").split("\n\n")]
        fitting = [text.strip("\n") + "\n" for text in found if _SHORTEST <= len(text) <= _LONGEST]
        texts[kind] = [fitting[place * len(fitting) // most] for place in range(min(most, len(fitting)))]
    texts["files"].insert(0, json.dumps(SCHEMA) + "\n")
    return {"seed": 70, "prefix": PREFIX, "turns": TURNS, "schema": SCHEMA, "texts": texts}


if __name__ == "__main__":
    FILE.write_text(json.dumps(record(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
