"""Chat templates: a conversation to the text the model was trained to continue.

Owns the environment that templates of model files expect (that of Hugging Face and llama.cpp) and its limits, for
a template is a program from a stranger. Knows nothing of tokens.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import SandboxedEnvironment, SecurityError
from jinja2.utils import pass_context

from dflashc.runtime.errors import RequestError

MAX_TEXT = 1 << 24
"""Characters in a rendered conversation, or in one repeated string."""
MAX_STEPS = 1_000_000
"""Turns of all loops of one rendering together."""
MAX_EXPONENT = 64

_FILE_NAME = "<template>"  # jinja2's name for a template without a file, in tracebacks
_TURNS = "turns of loops"  # no identifier, so a template cannot name it


class ChatTemplate:
    """A compiled Jinja chat template.

    Parameters
    ----------
    source : the template.
    bos_token, eos_token : texts of the begin and end tokens, empty where the model has none.

    Raises
    ------
    RequestError
        `source` is no valid Jinja; the message names the line.
    """

    def __init__(self, source: str, bos_token: str = "", eos_token: str = "") -> None:
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        try:
            self._template = _Environment().from_string(source)
        except TemplateSyntaxError as error:
            lines = source.splitlines() or [""]
            line = lines[min(error.lineno, len(lines)) - 1].strip()
            raise RequestError(f"chat template, line {error.lineno}: {error.message}, in {line[:80]!r}") from error
        except RecursionError as error:
            raise RequestError("chat template: nested too deeply") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        enable_thinking: bool = True,
        now: datetime | None = None,
        **extra: Any,
    ) -> str:
        """Return the prompt of a conversation in OpenAI's form.

        Contents that are null count as empty, lists of text parts are joined by newlines, and arguments of tool
        calls may be JSON text or objects. Nothing that is passed in changes.

        Parameters
        ----------
        tools : function declarations, in OpenAI's form.
        add_generation_prompt : end with what opens the assistant's turn.
        enable_thinking : what templates of thinking models ask for.
        now : the time that templates read; the present by default.
        extra : further variables of the template.

        Raises
        ------
        RequestError
            The template refuses the conversation (with its own words), fails, or exceeds a limit.
        """
        time = now or datetime.now()
        variables = {
            **self._tokens,
            "add_generation_prompt": add_generation_prompt,
            "enable_thinking": enable_thinking,
            "date_string": time.strftime("%d %b %Y"),
            "datetime": time.strftime("%b %d %Y"),
            "strftime_now": time.strftime,
            **_copied(extra),
            "messages": [_prepared(i, message) for i, message in enumerate(messages)],
            _TURNS: _Turns(MAX_STEPS),
        }
        if tools:
            variables["tools"] = _copied(tools)
        try:
            return self._rendered(variables)
        except _Refusal as refusal:
            raise RequestError(f"the chat template refuses the conversation: {refusal}") from refusal
        except RequestError:
            raise
        except Exception as error:  # a template can raise whatever Python can
            raise RequestError(f"chat template{_place(error)}: {error or type(error).__name__}") from error

    def _rendered(self, variables: dict[str, Any]) -> str:
        chunks: list[str] = []
        size = 0
        for chunk in self._template.generate(variables):
            chunks.append(chunk)
            size += len(chunk)
            if size > MAX_TEXT:
                raise RequestError(f"chat template: the prompt exceeds {MAX_TEXT} characters")
        return "".join(chunks)


class _Refusal(Exception):
    """What a template raises by `raise_exception`."""


def _raise_exception(message: str) -> NoReturn:
    raise _Refusal(message)


class _Turns:
    """How many turns the loops of one rendering may still take."""

    def __init__(self, left: int) -> None:
        self.left = left


@pass_context
def _counted(context: Context, items: Any) -> Iterator[Any]:
    turns: _Turns = context.parent[_TURNS]
    for item in items:
        turns.left -= 1
        if turns.left < 0:
            raise SecurityError(f"its loops take more than {MAX_STEPS} turns")
        yield item


class _ToolArguments(dict[str, Any]):
    """Arguments of a tool call: an object to templates that look inside, JSON text to those that just print it."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, other: str) -> str:
        return str(self) + other

    def __radd__(self, other: str) -> str:
        return other + str(self)


class _GenerationTag(Extension):
    """`{% generation %}` marks what a model is trained on; for rendering it means nothing."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's interface)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(SandboxedEnvironment):
    """jinja2's sandbox with what chat templates expect, and with bounds on loops, repetition and powers.

    Lists may be changed, as published templates do: every list in reach is a copy that belongs to the rendering.
    """

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag])
        self.globals["raise_exception"] = _raise_exception
        self.filters["counted"] = _counted
        self.filters["tojson"] = _to_json
        # The text is a prompt, not HTML: nothing is ever escaped, so nothing needs to be declared safe.
        self.filters["safe"] = str

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not (_is_small(left, 1 << 32) and _is_small(right, MAX_EXPONENT)):
            raise SecurityError("it raises to too high a power")
        if operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, Sequence) and isinstance(other, int) and len(one) * other > MAX_TEXT:
                    raise SecurityError("it repeats a text too often")
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Make every loop of the template count its turns."""
        template = super()._parse(source, name, filename)
        for loop in template.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "counted", [], [], None, None).set_lineno(loop.lineno)
        return template


def _is_small(value: Any, limit: int) -> bool:
    return isinstance(value, int | float) and abs(value) <= limit


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        list(value) if isinstance(value, Iterator) else value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _copied(value: Any) -> Any:
    """A deep copy of JSON-like data, so that a template can change nothing of its caller's."""
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copied(item) for item in value]
    return value


def _prepared(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of one message, with content as text and arguments of tool calls as objects."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"messages[{index}] has no role, expected an object with role and content")
    prepared = _copied(message)
    prepared["content"] = _text(index, prepared.get("content"))
    for call in prepared.get("tool_calls") or []:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and "arguments" in function:
            function["arguments"] = _arguments(function["arguments"])
    return prepared


def _text(index: int, content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"messages[{index}].content is {type(content).__name__}, expected text or a list of parts")
    for part in content:
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            kind = part.get("type") if isinstance(part, dict) else part
            raise RequestError(f"messages[{index}].content has a part of type {kind!r}, only 'text' can be read")
    return "\n".join(part["text"] for part in content)


def _arguments(arguments: Any) -> Any:
    """Arguments as an object; text that is no JSON object is left as the client sent it."""
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except ValueError:
            return arguments
        return _ToolArguments(parsed) if isinstance(parsed, dict) else arguments
    return _ToolArguments(arguments) if isinstance(arguments, dict) else arguments


def _place(error: Exception) -> str:
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == _FILE_NAME]
    return f", line {lines[-1]}" if lines else ""
