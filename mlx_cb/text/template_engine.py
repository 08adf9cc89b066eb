"""Runs a checkpoint's Jinja chat template in a sandbox, as transformers does.

Owns the environment (globals, filters, extensions) and the limits on time and size. Knows nothing
about messages: what a template is given is `chat_template`'s business.
"""

from __future__ import annotations

import json
import time
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from mlx_cb.errors import InvalidRequest

LONGEST_PROMPT = 64 * 2**20
LONGEST_RENDER_S = 10.0  # of the thread's own CPU time: a loaded machine refuses nobody
SLOW_RENDER_S = 0.2
LARGEST_EXPONENT = 64
_TICK = "mlx_cb_tick"


class TemplateRefusal(InvalidRequest):
    """The template cannot render these messages; the message is the template's own, one line."""

    code = "invalid_messages"


class _RaisedByTemplate(jinja2.TemplateError):
    """The template called `raise_exception`."""


class _GenerationBlocks(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for training; when serving it is only its body."""

    tags = {"generation"}  # noqa: RUF012 - the type that jinja2 declares

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise _RaisedByTemplate(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which would change what the model reads.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


class _OutOfBounds(jinja2.TemplateError):
    """The template wants more time or space than a prompt can need."""


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox, and no operator in it makes a huge value out of small ones."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Multiply or raise to a power, within bounds."""
        if operator == "**" and abs(right) > LARGEST_EXPONENT:
            raise _OutOfBounds(f"an exponent above {LARGEST_EXPONENT}")
        for value, factor in ((left, right), (right, left)):
            if hasattr(value, "__len__") and len(value) * factor > LONGEST_PROMPT:
                raise _OutOfBounds(f"a value of more than {LONGEST_PROMPT} elements")
        return super().call_binop(context, operator, left, right)


class _Clock:
    """One render's CPU time; loops and macros look at it at every turn."""

    def __init__(self) -> None:
        self._began = time.thread_time()

    @property
    def seconds(self) -> float:
        return time.thread_time() - self._began

    def check(self) -> None:
        if self.seconds > LONGEST_RENDER_S:
            raise _OutOfBounds(f"it took longer than {LONGEST_RENDER_S:.0f} s")


def _with_ticks(tree: jinja2.nodes.Template) -> jinja2.nodes.Template:
    """The template with a look at the clock in every loop and macro, so that none is endless.

    Looking only at what the template writes would miss a loop that writes nothing.
    """
    loops, macros = tree.find_all(jinja2.nodes.For), tree.find_all(jinja2.nodes.Macro)
    found: list[jinja2.nodes.For | jinja2.nodes.Macro] = [*loops, *macros]
    for node in found:
        name = jinja2.nodes.Name(_TICK, "load", lineno=node.lineno)
        call = jinja2.nodes.Call(name, [], [], None, None, lineno=node.lineno)
        node.body.insert(0, jinja2.nodes.ExprStmt(call, lineno=node.lineno))
    return tree


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlocks, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class CompiledTemplate:
    """One template, ready to render; safe to share between threads."""

    def __init__(self, source: str) -> None:
        environment = _environment()
        try:
            tree = environment.parse(source)
            ticking = _with_ticks(environment.parse(source))
            self._template = environment.from_string(ticking)
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"the chat template does not parse: {_one_line(error)}") from error
        self.source = source
        #: true once a render took so long that it has no place on an event loop
        self.is_slow = False
        #: all text that the template itself can write, to find its control tokens in
        self.literals = "\0".join(
            [node.data for node in tree.find_all(jinja2.nodes.TemplateData)]
            + [
                node.value
                for node in tree.find_all(jinja2.nodes.Const)
                if isinstance(node.value, str)
            ]
        )
        self.variables = frozenset(
            node.name for node in tree.find_all(jinja2.nodes.Name) if node.ctx == "load"
        )

    def render(self, variables: dict[str, Any]) -> str:
        """The prompt. Raises TemplateRefusal with the template's own words."""
        clock = _Clock()
        pieces, size = [], 0
        try:
            for piece in self._template.generate({**variables, _TICK: clock.check}):
                pieces.append(piece)
                size += len(piece)
                if size > LONGEST_PROMPT:
                    raise _OutOfBounds(f"it wrote more than {LONGEST_PROMPT} characters")
                clock.check()
        except _RaisedByTemplate as error:
            raise TemplateRefusal(
                f"the model's chat template refuses these messages: {_one_line(error)}",
                param="messages",
            ) from error
        except _OutOfBounds as error:
            raise TemplateRefusal(
                f"the model's chat template was stopped: {error}", param="messages"
            ) from error
        except Exception as error:  # a template is foreign code: it can raise anything
            raise TemplateRefusal(
                f"the model's chat template cannot render these messages: "
                f"{type(error).__name__}: {_one_line(error)}",
                param="messages",
            ) from error
        finally:
            self.is_slow = self.is_slow or clock.seconds > SLOW_RENDER_S
        return "".join(pieces)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
