"""Chat templates: what their environment offers, what stops them, and what changes nothing."""

from __future__ import annotations

from copy import deepcopy
from datetime import datetime
from typing import Any

import pytest

from dflashc.runtime.errors import RequestError
from dflashc.runtime.template import ChatTemplate

HELLO = [{"role": "user", "content": "hello"}]
CHATML = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
CALL = {"type": "function", "function": {"name": "f", "arguments": '{"city": "Köln", "n": 1}'}}


def render(source: str, messages: list[dict[str, Any]] | None = None, **extra: Any) -> str:
    return ChatTemplate(source, "<s>", "</s>").render(HELLO if messages is None else messages, **extra)


def test_chatml() -> None:
    template = ChatTemplate(CHATML)
    turn = "<|im_start|>user\nhello<|im_end|>\n"
    assert template.render(HELLO) == turn + "<|im_start|>assistant\n"
    assert template.render(HELLO, add_generation_prompt=False) == turn


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}|{{ eos_token }}", "<s>|</s>"),
        ("{{ enable_thinking }} {{ tools is defined }}", "True False"),
        ("{{ strftime_now('%Y-%m-%d') }} {{ date_string }} {{ datetime }}", "2026-03-04 04 Mar 2026 Mar 04 2026"),
        ("{{ {'a': 'é<'} | tojson }}", '{"a": "é<"}'),
        ("{{ {'b': 1, 'a': [2]} | tojson(indent=2, sort_keys=True) }}", '{\n  "a": [\n    2\n  ],\n  "b": 1\n}'),
        ("{{ [1, 2] | map('string') | tojson }}", '["1", "2"]'),
        ("{{ '<b>&' | safe + '<' }}", "<b>&<"),
        ("{{ ' a b '.strip().split(' ')[-1:] }} {{ 'xay'.lstrip('x') }} {{ 'ab'[::-1] }}", "['b'] ay ba"),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "13"),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
        ("{% for i in 'ab' %}{{ loop.index0 }}{{ loop.last }}{{ loop.length }} {% endfor %}", "0False2 1True2 "),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "hello!"),
        ("{% set ns = namespace(n=0) %}{% for c in 'abc' %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "3"),
        ("{% set x = [] %}{% set _ = x.append(1) %}{{ x }}", "[1]"),
        ("  {% if true %}\na\n  {% endif %}\nb", "a\nb"),  # blocks take the line they stand on
        ("{{ effort }}", "high"),
    ],
)
def test_environment(source: str, expected: str) -> None:
    assert render(source, now=datetime(2026, 3, 4), effort="high") == expected


@pytest.mark.parametrize(
    ("content", "expected"),
    [(None, "[]"), ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "[a\nb]"), ("", "[]")],
)
def test_content_is_text(content: Any, expected: str) -> None:
    assert render("[{{ messages[0].content }}]", [{"role": "user", "content": content}]) == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ a | tojson }}", '{"city": "Köln", "n": 1}'),
        ("{{ a.city }} {{ a is mapping }} {{ a is string }}", "Köln True False"),
        ("{% for k, v in a | items %}{{ k }}={{ v }} {% endfor %}", "city=Köln n=1 "),
        ("{{ '>' + a + '<' }} {{ a }}", '>{"city": "Köln", "n": 1}< {"city": "Köln", "n": 1}'),
    ],
)
@pytest.mark.parametrize("form", ["text", "object"])
def test_arguments_of_tool_calls_serve_every_template(source: str, expected: str, form: str) -> None:
    call = deepcopy(CALL)
    if form == "object":
        call["function"]["arguments"] = {"city": "Köln", "n": 1}  # type: ignore[index]
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    assert render("{% set a = messages[0].tool_calls[0].function.arguments %}" + source, messages) == expected


def test_arguments_that_are_no_json_object_stay_text() -> None:
    messages = [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{broken"}}]}]
    assert render("{{ messages[0].tool_calls[0].function.arguments }}", messages) == "{broken"


def test_nothing_of_the_caller_changes() -> None:
    messages = [{"role": "user", "content": "x", "tool_calls": [deepcopy(CALL)]}]
    before = deepcopy(messages)
    source = "{% set _ = messages.append(1) %}{% set _ = messages[0].update(role='y') %}{{ messages | length }}"
    assert render(source, messages) == "2"
    assert messages == before


def test_syntax_errors_name_the_line() -> None:
    with pytest.raises(RequestError, match=r"chat template, line 3: .*in '{% endfor %}'"):
        ChatTemplate("a\nb\n{% endfor %}\n")


def test_a_refusal_keeps_its_words() -> None:
    with pytest.raises(RequestError, match=r"refuses the conversation: System role not supported$"):
        render("{{ raise_exception('System role not supported') }}")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("\n{{ 1 / 0 }}", "line 2: division by zero"),
        ("{{ nothing.at_all }}", "'nothing' is undefined"),
        ("{{ 'a' + 1 }}", "line 1: "),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ range(10**9) }}", "[Rr]ange"),
        ("{{ 10 ** 10 ** 10 }}", "too high a power"),
        ("{{ 'x' * 10**9 }}", "repeats a text too often"),
        ("{{ 10**9 * 'x' }}", "repeats a text too often"),
        (
            "{% set r = range(9999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
            "more than 1000000",
        ),
        ("{% set x = 'x' * 10**6 %}{% for i in range(99) %}{{ x }}{% endfor %}", "exceeds 16777216 characters"),
    ],
)
def test_failures_and_limits(source: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        render(source)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"content": "x"}, r"messages\[0\] has no role"),
        ({"role": "user", "content": 3}, r"messages\[0\].content is int"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "part of type 'image_url', only 'text'"),
    ],
)
def test_messages_that_cannot_be_read(message: dict[str, Any], error: str) -> None:
    with pytest.raises(RequestError, match=error):
        render("x", [message])
