"""Chat templates as Hugging Face models have them: Jinja in a sandbox."""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

from paged_jax.models.errors import require


def render(template: str, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
    """Return the prompt that a template makes of messages, each with `role` and `content`.

    Raises ValueError, of whatever kind the template's own error is: where it does not compile,
    reads what is not there, refuses the messages, adds a number to a text or never ends.
    """
    environment = _environment()
    try:
        return environment.from_string(template).render(messages=list(messages), **variables)
    except Exception as error:  # a template is a program, and may raise anything
        reason = str(error) or type(error).__name__
        raise ValueError(f"the chat template failed: {reason:.500}") from error


def _environment() -> Any:
    """Return the Jinja environment in which transformers renders templates."""
    jinja2 = require("jinja2", "a chat template")
    sandbox = require("jinja2.sandbox", "a chat template")

    def refuse(message: str):
        raise jinja2.TemplateError(message)

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _generation_tag()],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda pattern: datetime.datetime.now().strftime(pattern)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: Sequence[str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON, without the escapes for HTML of Jinja's own filter: `"<é>" -> '"<é>"'`."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=None if separators is None else (separators[0], separators[1]),
        sort_keys=sort_keys,
    )


def _generation_tag() -> type:
    """Return the extension for the tag that marks what an assistant says.

    It renders its body: `a{% generation %}b{% endgeneration %}c -> abc`. What the body sets is not
    set behind it.
    """
    extensions, nodes = require("jinja2.ext", "a template"), require("jinja2.nodes", "a template")

    class Generation(extensions.Extension):
        tags = frozenset({"generation"})

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    return Generation
