"""One engine with a drafter: `head_drafts.py JSON` prints every draft token that it proposes, as JSON."""

from __future__ import annotations

import functools
import json
import sys
from typing import Any

import engines


def drafted(model: str, spac: dict, options: dict) -> list[Any]:
    """Returns what the drafter proposed in each step, a list of tokens per request."""
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    found, propose = [], SpecDecodeBaseProposer.propose

    @functools.wraps(propose)  # the plugin looks at its parameters
    def recorded(self, *args: Any, **kwargs: Any):
        drafts = propose(self, *args, **kwargs)
        found.append(drafts if isinstance(drafts, list) else drafts.tolist())
        return drafts

    SpecDecodeBaseProposer.propose = recorded
    engines.run(model, spac, **options)
    return found


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    print(json.dumps(drafted(asked["model"], asked["spac"], asked["options"])))
