"""Public chat templates against the prompts llama.cpp renders."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from dflashc.runtime.errors import RequestError
from dflashc.runtime.template import ChatTemplate
from tests.reference.shared import golden, shared

RECORDED = datetime(2026, 11, 29)
BOS, EOS = "\x0b", "<|endoftext|>"  # of the model llama.cpp had loaded

# Variables llama.cpp gives certain templates on its own account.
VARIABLES: dict[str, dict[str, Any]] = {
    "deepseek-ai-DeepSeek-V4": {"drop_thinking": False},
    "fireworks-ai-llama-3-firefunction-v2": {"functions": ""},  # undefined, which llama.cpp adds up as empty text
}
# Templates without marks of thinking, which llama.cpp finds by trial and gives enable_thinking = false unless asked.
NOT_THINKING = {"Apertus-8B-Instruct"}
# What differs: a part of the conversation's name, and why.
EXCEPTIONS = {
    "MiroThinker": (
        ("plain+tools", "system", "toolcall", "assistant_first"),
        "the template sets attributes of objects that are no namespace and reads a loop's variable in a macro, "
        "both of which Jinja forbids",
    ),
    "google-gemma-2-2b-it": (
        ("system",),
        "llama.cpp merges a refused system message into the next",
    ),
    "google-gemma-4-31B-it-interleaved": (("toolcall",), "llama.cpp rewrites the results of tools for this template"),
}


def rendered(template: ChatTemplate, name: str, case: str) -> str:
    conversation, _, option = case.partition("+")
    thinking = option != "nothink" and not (name in NOT_THINKING and option != "think")
    return template.render(
        golden("templates")["conversations"][conversation],
        tools=golden("templates")["tools"] if option == "tools" else None,
        enable_thinking=thinking,
        now=RECORDED,
        **VARIABLES.get(name, {}),
    )


def test_every_template() -> None:
    compared = 0
    for file, cases in golden("templates")["templates"].items():
        name = file.removesuffix(".jinja")
        template = ChatTemplate(shared(f"golden/templates/{file}").read_text(encoding="utf-8"), BOS, EOS)
        beginnings, _ = EXCEPTIONS.get(name, ((), ""))
        for case, expected in cases.items():
            if case.startswith(tuple(beginnings)):
                continue
            compared += 1
            if "error" in expected:  # in each the template raises; the record holds where, not its words
                assert "raise_excepti" in expected["error"]
                with pytest.raises(RequestError, match=r"refuses the conversation: .* must alternate"):
                    rendered(template, name, case)
            else:
                assert rendered(template, name, case) == expected["prompt"], (name, case)
    assert compared == 55 * 8 - 8


def test_gemma_2_refuses_a_system_message_in_its_own_words() -> None:
    template = ChatTemplate(shared("golden/templates/google-gemma-2-2b-it.jinja").read_text(encoding="utf-8"))
    with pytest.raises(RequestError, match="System role not supported"):
        rendered(template, "google-gemma-2-2b-it", "system")
