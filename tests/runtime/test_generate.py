"""Text out of a session: what is shown, why it ends, and what the caches hold afterwards."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from dflashc.runtime.errors import ArtefactError, RequestError
from dflashc.runtime.generate import Generator, Model, load
from dflashc.runtime.processors import available_processors, choose_threads
from dflashc.runtime.sampling import SamplingParameters
from dflashc.runtime.tokenizer import Tokenizer
from tests.runtime.scripted import ScriptedDevice, scripted_artefact, scripted_session
from tests.runtime.vocabulary import BYTE_LEVEL, SENTENCEPIECE, build

GREEDY = SamplingParameters(temperature=0)
END = 262  # <|im_end|> of BYTE_LEVEL
THINK = 263  # <think>, not a control token
TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}>{% endif %}"


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return build(tmp_path, BYTE_LEVEL, **{"tokenizer.chat_template": TEMPLATE}).tokenizer()


def continuing(ids: Sequence[int]) -> Callable[[list[int]], int]:
    """A model that goes on with `ids` behind the prompt "?", whatever stands there, and then ends."""
    return lambda tokens: ids[len(tokens) - 1] if len(tokens) <= len(ids) else END


class Scripted(Generator):
    """A generator whose model says `ids` after the prompt "?"."""

    def __init__(self, tokenizer: Tokenizer, ids: Sequence[int], context: int = 256) -> None:
        super().__init__(scripted_session(continuing(ids), tokenizer.vocab_size, context), tokenizer)

    def say(self, **options) -> str:
        return "".join(self.generate([ord("?") - 33], options.pop("parameters", GREEDY), **options))


def letters(tokenizer: Tokenizer, text: str) -> list[int]:
    """One token per byte."""
    return [i for byte in text.encode() for i in range(256) if tokenizer.piece(i) == bytes([byte])]


@pytest.mark.parametrize("parameters", [GREEDY, SamplingParameters(seed=1)], ids=["argmax", "sampled"])
def test_everything_up_to_the_end_token_is_shown(tokenizer: Tokenizer, parameters: SamplingParameters) -> None:
    generator = Scripted(tokenizer, letters(tokenizer, "größer"))
    assert generator.say(parameters=parameters) == "größer"
    report = generator.report
    assert report is not None
    assert (report.finish, report.stop, report.statistics.generated, report.decoded) == ("stop", None, 8, 8)
    assert len(generator.session.tokens) == 9


def test_budget_ends_with_length_and_shows_what_was_held_back(tokenizer: Tokenizer) -> None:
    generator = Scripted(tokenizer, letters(tokenizer, "abcdef"))
    assert generator.say(max_tokens=3, stops=["cdX"]) == "abc"
    assert generator.report is not None
    assert generator.report.finish == "length"
    assert generator.report.decoded == 2, "the last token is given, not computed"


def test_a_budget_that_the_answer_fits_exactly_is_length(tokenizer: Tokenizer) -> None:
    generator = Scripted(tokenizer, letters(tokenizer, "abc"))
    assert generator.say(max_tokens=3) == "abc"
    assert generator.report is not None
    assert generator.report.finish == "length"


def test_a_full_context_ends(tokenizer: Tokenizer) -> None:
    generator = Scripted(tokenizer, letters(tokenizer, "x" * 20), context=8)
    assert generator.say() == "x" * 8, "seven in the caches behind the prompt, and the one they lead to"
    assert generator.report is not None
    assert generator.report.finish == "context"


def test_an_end_token_after_the_last_place_is_a_stop(tokenizer: Tokenizer) -> None:
    generator = Scripted(tokenizer, letters(tokenizer, "x" * 7), context=8)
    assert generator.say() == "x" * 7
    assert generator.report is not None
    assert generator.report.finish == "stop"


@pytest.mark.parametrize(
    ("stops", "text", "kept"),
    [
        (["cd"], "ab", 2),
        (["d", "ef"], "abc", 3),
        (["abc"], "", 0),
        (["X"], "abcdefg", 7),
    ],
)
def test_stop_strings(tokenizer: Tokenizer, stops: list[str], text: str, kept: int) -> None:
    generator = Scripted(tokenizer, letters(tokenizer, "abcdefg"))
    assert generator.say(stops=stops) == text
    assert generator.report is not None
    assert generator.report.finish == "stop"
    assert generator.report.stop == (None if stops == ["X"] else stops[0])
    assert len(generator.session.tokens) == 1 + kept, "tokens beyond the shown text are forgotten"


def test_a_token_that_is_shown_in_part_is_forgotten(tokenizer: Tokenizer) -> None:
    hello = BYTE_LEVEL["tokens"].index("hello")
    generator = Scripted(tokenizer, [*letters(tokenizer, "ab"), hello, hello])
    assert generator.say(stops=["loh"]) == "abhel"
    assert len(generator.session.tokens) == 1 + 2


def test_an_unfinished_character_can_complete_a_stop_string(tokenizer: Tokenizer) -> None:
    generator = Scripted(tokenizer, [*letters(tokenizer, "a"), *letters(tokenizer, "ö")[:1]])
    assert generator.say(stops=["\N{REPLACEMENT CHARACTER}"]) == "a"
    assert generator.report is not None
    assert generator.report.stop == "\N{REPLACEMENT CHARACTER}"


def test_special_tokens_are_left_out_unless_asked_for(tokenizer: Tokenizer) -> None:
    start = 261
    ids = [*letters(tokenizer, "a"), start, THINK, *letters(tokenizer, "b")]
    assert Scripted(tokenizer, ids).say() == "a<think>b"
    assert Scripted(tokenizer, ids).say(skip_special=False) == "a<|im_start|><think>b"


def test_closing_cancels_and_keeps_what_was_shown(tokenizer: Tokenizer) -> None:
    generator = Scripted(tokenizer, letters(tokenizer, "abcdefg"))
    texts = generator.generate([30], GREEDY, stops=["cdX"])
    assert [next(texts) for _ in range(4)] == ["a", "b", "", ""]
    texts.close()  # "cd" was held back
    assert generator.report is not None
    assert generator.report.finish == "cancelled"
    assert generator.session.tokens == [30, *letters(tokenizer, "ab")]


def test_the_next_turn_continues_from_what_was_shown(tokenizer: Tokenizer) -> None:
    generator = Scripted(tokenizer, letters(tokenizer, "abcdefg"))
    device = generator.session._device
    assert isinstance(device, ScriptedDevice)
    generator.say(stops=["de"])
    device.runs.clear()
    prompt = [30, *letters(tokenizer, "abc?!")]
    assert "".join(generator.generate(prompt, GREEDY)) == "fg"
    assert generator.report is not None
    assert (generator.report.statistics.prompt, generator.report.statistics.cached) == (6, 4)
    assert device.runs == [2, 1, 1], "two new tokens of the prompt, then one at a time"


def test_the_same_prompt_again_computes_one_token(tokenizer: Tokenizer) -> None:
    generator = Scripted(tokenizer, letters(tokenizer, "ab"))
    first = generator.say()
    assert generator.say() == first
    assert generator.report is not None
    assert generator.report.statistics.cached == 0, "the only token of the prompt is run for its head"


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "empty"),
        ([1], {"max_tokens": 0}, "max_tokens"),
        ([1], {"stops": [""]}, "empty stop string"),
        ([1] * 9, {}, "context"),
        ([9999], {}, "vocabulary"),
    ],
)
def test_requests_that_cannot_be_served(tokenizer: Tokenizer, prompt: list[int], options: dict, message: str) -> None:
    generator = Scripted(tokenizer, [1], context=8)
    with pytest.raises(RequestError, match=message):
        list(generator.generate(prompt, GREEDY, **options))
    assert generator.say() != "", "the session still works"


def model_of(tokenizer: Tokenizer) -> Model:
    artefact = scripted_artefact(tokenizer.vocab_size, 8192)
    return Model(artefact, tokenizer, ScriptedDevice(lambda tokens: END, tokenizer.vocab_size))


def test_a_conversation_is_encoded_by_the_template(tokenizer: Tokenizer) -> None:
    ids = model_of(tokenizer).encode([{"role": "user", "content": "hello"}])
    assert tokenizer.decode(ids) == "user:hello;>"


def test_text_is_encoded_as_it_is(tokenizer: Tokenizer) -> None:
    model = model_of(tokenizer)
    assert model.encode("<|im_end|>", parse_special=True) == [END]
    assert tokenizer.decode(model.encode("<|im_end|>")) == "<|im_end|>"


def test_without_template_a_conversation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no chat template"):
        model_of(build(tmp_path, BYTE_LEVEL).tokenizer()).encode([{"role": "user", "content": "x"}])


def test_the_begin_token_stands_once(tmp_path: Path) -> None:
    """SentencePiece models begin with <s>, and many of their templates write it as well."""
    template = {"tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}"}
    ids = model_of(build(tmp_path, SENTENCEPIECE, **template).tokenizer()).encode([{"role": "user", "content": "ab"}])
    assert ids.count(1) == 1
    assert ids[0] == 1


@pytest.mark.parametrize(
    ("asked", "needed", "context"),
    [(None, 0, 4096), (None, 4097, 4352), (None, 10**6, 8192), (1, 0, 256), (257, 0, 512), (10**6, 0, 8192)],
)
def test_choice_of_the_context(tokenizer: Tokenizer, asked: int | None, needed: int, context: int) -> None:
    assert model_of(tokenizer).choose_context(asked, needed) == context


def test_between_parts_of_a_prompt_it_can_be_left(tokenizer: Tokenizer) -> None:
    """The parts that were run are in the caches and are not run again."""

    class Enough(Exception):
        pass

    def leave() -> None:
        if len(generator.session.tokens) >= 8:
            raise Enough

    ids = letters(tokenizer, "a prompt of more than a part")
    generator = Generator(scripted_session(lambda tokens: END, tokenizer.vocab_size), tokenizer)
    with pytest.raises(Enough):
        list(generator.generate(ids, GREEDY, pause=leave))
    report = generator.report
    assert report is not None
    assert (report.finish, report.statistics.generated) == ("cancelled", 0)
    assert generator.session.tokens == ids[:8]
    list(generator.generate(ids, GREEDY))
    assert generator.session.statistics.cached == 8


def test_threads_are_those_of_the_process(tmp_path: Path) -> None:
    quota = tmp_path / "cpu.max"
    assert available_processors(quota, tmp_path) == choose_threads(available_processors(quota, tmp_path))
    quota.write_text("50000 100000\n")
    assert available_processors(quota, tmp_path) == 1
    quota.write_text("max 100000\n")
    assert available_processors(quota, tmp_path) == available_processors(tmp_path / "none", tmp_path)
    with pytest.raises(RequestError, match="0 threads"):
        choose_threads(0)
    with pytest.raises(RequestError, match="100000 threads"):
        choose_threads(100000)


def test_loading_what_is_no_artefact(tmp_path: Path) -> None:
    with pytest.raises(ArtefactError, match="not an artefact"):
        load(tmp_path)


def test_the_runtime_is_light() -> None:
    """Neither the compiler nor TVM, tokenizers or jinja2 are loaded to generate text, and little memory is taken."""
    script = """
import sys
import dflashc.runtime.generate, dflashc.runtime.session
heavy = {"tvm", "tvm_ffi", "tokenizers", "jinja2", "gguf", "rich", "click"}
own = {f"dflashc.{part}" for part in ("compiler", "targets", "passes", "recipes")}
print(sorted(m for m in sys.modules if m.partition(".")[0] in heavy or ".".join(m.split(".")[:2]) in own))
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""
    loaded, kilobytes = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()
    assert loaded == "[]"
    assert int(kilobytes) < 80 * 1024


def test_an_artefact_continues_a_text(pycode_artefact: Path) -> None:
    """Two turns of twelve tokens say the same as one of twenty-four."""
    with load(pycode_artefact) as model:
        generator = model.generator(model.choose_context(512))
        prompt = model.encode("def main():\n")
        whole = "".join(generator.generate(prompt, GREEDY, max_tokens=24))
        half = "".join(generator.generate(prompt, GREEDY, max_tokens=12))
        tokens = list(generator.session.tokens)
        rest = "".join(generator.generate([*tokens, *model.encode(half)[-1:]], GREEDY, max_tokens=12))
    assert half + rest == whole
    assert generator.report is not None
    assert generator.report.statistics.cached == len(tokens)
