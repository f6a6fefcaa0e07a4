"""Chat templates as Hugging Face models have them: Jinja in a sandbox."""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

from paged_jax.models.errors import require


def render(template: str, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
    """Return the prompt that a template makes of messages, each with `role` and `content`.

    Raises ValueError where the template does not compile, reads what is not there or refuses the
    messages.
    """
    jinja2 = require("jinja2", "a chat template")
    sandbox = require("jinja2.sandbox", "a chat template")

    def refuse(message: str):
        raise jinja2.TemplateError(message)

    def to_json(value: Any, indent: int | None = None, **options: Any) -> str:
        # Jinja's own tojson escapes HTML, which would change the prompt.
        return json.dumps(value, ensure_ascii=False, indent=indent, **options)

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda pattern: datetime.datetime.now().strftime(pattern)
    try:
        return environment.from_string(template).render(messages=list(messages), **variables)
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template failed: {error}") from error
