"""Jinja's chat templates as Go's: what a small reader of Go's language makes of them, beside what Jinja does."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from jinja2 import Environment

from sft.export.go_template import Message, literal, read_markup
from sft.recipe.schema import REPOSITORY

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
CONVERSATIONS = ("u", "su", "uau", "suau", "uauau", "suauau")
ROLES = {"s": "system", "u": "user", "a": "assistant"}


def conversation(roles: str) -> list[Message]:
    return [{"role": ROLES[role], "content": f'{number}. {{{{ "x" }}}} "{role}"'} for number, role in enumerate(roles)]


def apply_of(template: str) -> Callable[[Sequence[Message]], str]:
    from transformers.utils.chat_template_utils import render_jinja_template

    def apply(messages: Sequence[Message]) -> str:
        try:
            rendered = render_jinja_template(
                [list(messages)], chat_template=template, add_generation_prompt=True, **TOKENS
            )
        except Exception as error:
            raise ValueError(str(error)) from None
        return str(rendered[0][0])

    return apply


def go(template: str, messages: Sequence[Message]) -> str:
    """What Go's text/template writes: what is used of its language, Jinja has under other names."""
    texts, jinja, blocks = list[str](), "", list[str]()
    for part in re.split(r'(\{\{(?:"(?:\\.|[^"\\])*"|.)*?\}\})', template, flags=re.DOTALL):
        words = part[2:-2].strip()
        if not part.startswith("{{") or words.startswith('"'):
            jinja += f"{{{{ texts[{len(texts)}] }}}}"
            texts.append(json.loads(words) if part.startswith("{{") else part)
        elif words == ".Content":
            jinja += "{{ message.content }}"
        elif words == '$last := ""':
            jinja += "{% set before = namespace(role='') %}"
        elif words == "$last = .Role":
            jinja += "{% set before.role = message.role %}"
        elif words == "range .Messages":
            jinja += "{% for message in messages %}"
            blocks.append("for")
        elif words == "end":
            jinja += f"{{% end{blocks.pop()} %}}"
        elif words == "else":
            jinja += "{% else %}"
        else:
            found = re.fullmatch(r'if eq (\.Role|\$last) ("\w*")', words)
            assert found, words
            jinja += f"{{% if {'message.role' if found[1] == '.Role' else 'before.role'} == {found[2]} %}}"
            blocks.append("if")
    return Environment(autoescape=False).from_string(jinja).render(texts=texts, messages=messages)  # noqa: S701


def templates() -> dict[str, str]:
    import importlib.util

    spec = importlib.util.find_spec("trl")
    assert spec is not None
    assert spec.origin is not None
    families = Path(spec.origin).parent / "chat_templates"
    ours = REPOSITORY / "sft" / "data" / "chat_templates"
    return {
        file.stem: file.read_text(encoding="utf-8")
        for folder in (families, ours)
        for file in sorted(folder.glob("*.jinja"))
    }


TEMPLATES = templates()
MUST = "chatml plain qwen2_5 qwen3 qwen3_instruct_2507 llama3 llama3_1 gemma gemma3 phi3 glm4moe".split()


@pytest.mark.parametrize("name", [*MUST, *sorted(set(TEMPLATES) - set(MUST))])
def test_what_go_writes_is_what_jinja_writes(name: str) -> None:
    apply = apply_of(TEMPLATES[name])
    try:
        markup = read_markup(apply)
    except ValueError:
        assert name not in MUST, "a family that recipes name cannot be written"
        return  # refused, which is no wrong template
    written = markup.go()
    for roles in CONVERSATIONS:
        if not markup.has_system and "s" in roles:
            continue
        assert go(written, conversation(roles)) == apply(conversation(roles))


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ messages[-1].content }}", "each message as it is"),
        ("{% for m in messages %}{{ loop.index }}{{ m.content }}{% endfor %}", "differs from one"),
        ("{{ raise_exception('no') }}", "no"),
    ],
)
def test_a_template_that_writes_anything_else_is_refused(template: str, why: str) -> None:
    apply = apply_of(template)
    with pytest.raises(ValueError, match=why):
        read_markup(apply)


@pytest.mark.parametrize("name", ["raises", "drops"])
def test_the_first_user_is_the_first_where_a_system_message_before_him_is_dropped(name: str) -> None:
    turns = "{{ bos_token }}{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}</>{% endfor %}<assistant>"
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    apply = apply_of(refuses + turns if name == "raises" else turns)
    markup = read_markup(apply)
    assert not markup.has_system
    assert go(markup.go(), conversation("suau")) == apply_of(turns)(conversation("suau"))


@pytest.mark.parametrize(
    "text",
    ["<|a|>\n", "{{ x }}", '"""', "a\u00a0b", "\x1b[0m", "\U000e0001", "back\\slash {"],
)
def test_a_literal_is_written_as_it_is_and_stays_visible(text: str) -> None:
    written = literal(text)
    visible = all(one.isprintable() or one in "\n\t" for one in written)
    assert visible, "Ollama leaves out of a Modelfile what cannot be seen"
    assert '"""' not in written, "it would end the Modelfile's quotes"
    inside = re.sub(r"\\U000(.)(....)", lambda found: chr(int(found[1] + found[2], 16)), written)
    assert go(inside, []) == text
