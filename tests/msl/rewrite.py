"""The few places where MSL text is not C++: rewritten for execution and for the lint.

Owns: threadgroup arrays, function constants, the explicit instantiation. Everything else of the
text reaches clang as it is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_ARRAY = re.compile(r"\bthreadgroup\s+([\w:]+(?:\s*<[^;>]*>)?)\s+(\w+)((?:\s*\[[^\];]+\])+)\s*;")
_CONSTANT = re.compile(r"constant (\w+) (\w+) \[\[function_constant\((\d+)\)\]\];")
_INSTANTIATION = re.compile(
    r"template \[\[host_name\(\"[^\"]*\"\)\]\] \[\[kernel\]\] decltype\((.*)\) (.*);"
)
_PARAMETER = re.compile(
    r"(?P<type>.*?)\s*(?P<name>\w+)\s*\[\[\s*(?P<attribute>\w+)(?:\((?P<index>\d+)\))?.*\]\]$", re.S
)


@dataclass(frozen=True)
class Parameter:
    type: str
    name: str
    attribute: str
    index: int | None


def threadgroup_arrays(text: str, template: str) -> str:
    """`threadgroup T x[N];` -> a reference to an array that `template` obtains.

    `template` is a format string over key (a number), type, name and dims.
    """
    counter = iter(range(10_000))

    def reference(m: re.Match[str]) -> str:
        return template.format(key=next(counter), type=m[1], name=m[2], dims=m[3])

    return _ARRAY.sub(reference, text)


def parse_parameters(text: str, name: str) -> list[Parameter]:
    """The parameters of kernel function `name`, in order.

    Raises:
        ValueError: no such kernel, or a parameter without an attribute.
    """
    start = re.search(rf"\[\[kernel\]\]\s+void\s+{re.escape(name)}\s*\(", text)
    if start is None:
        raise ValueError(f"no kernel named {name} in the text")
    end = re.compile(r"\)\s*\{").search(text, start.end())
    assert end is not None
    body = re.sub(r"//.*", "", text[start.end() : end.start()])
    parameters = []
    for piece in re.split(r",(?![^\[]*\]\])(?![^<]*>)", body):
        found = _PARAMETER.match(piece.strip())
        if found is None:
            raise ValueError(f"parameter without an attribute: {piece.strip()!r}")
        index = None if found["index"] is None else int(found["index"])
        parameters.append(Parameter(found["type"], found["name"], found["attribute"], index))
    return parameters


_VECTORS = {
    "thread_position_in_grid": "thread_in_grid",
    "threadgroup_position_in_grid": "group_in_grid",
    "thread_position_in_threadgroup": "thread_in_group",
    "threads_per_threadgroup": "threads_per_group",
    "threadgroups_per_grid": "groups",
    "threads_per_grid": "grid",
}
_SCALARS = {
    "thread_index_in_threadgroup": "index",
    "simdgroup_index_in_threadgroup": "simdgroup",
    "thread_index_in_simdgroup": "lane",
    "simdgroups_per_threadgroup": "simdgroups",
}


def _argument(p: Parameter) -> str:
    if p.attribute == "buffer":
        return f"{'MslReference' if '&' in p.type else 'MslPointer'}{{b[{p.index}]}}"
    if p.attribute in _SCALARS:
        return f"p.{_SCALARS[p.attribute]}"
    if p.attribute not in _VECTORS:
        raise ValueError(f"the emulator does not provide [[{p.attribute}]]")
    vector = f"msl_uint3(p.{_VECTORS[p.attribute]})"
    return vector if p.type.strip().endswith("3") else f"{vector}.x"


_ENTRY = """
struct MslPointer {{ void* p; template <class T> operator T*() const {{ return (T*)p; }} }};
struct MslReference {{ void* p; template <class T> operator T&() const {{ return *(T*)p; }} }};
extern "C" MSL_UNCHECKED void msl_entry(void** b) {{
  const MslPosition& p = msl_position[msl_lane];
  {call}({arguments});
}}
"""
_EXECUTED_ARRAY = (
    "static char msl_key_{key}; {type} (&{name}){dims} = "
    "*({type} (*){dims})msl_threadgroup_array(&msl_key_{key}, sizeof({type}{dims}));"
)


def executable(text: str, constants: dict[str, object] | None = None) -> str:
    """A C++ translation unit that exports msl_entry, from generated or hand-made MSL text.

    `constants` gives the function constants their values.
    """
    found = _INSTANTIATION.findall(text)
    if not found:
        raise ValueError("the text instantiates no kernel")
    call = found[-1][0]
    name = call.split("<")[0].strip()
    parameters = parse_parameters(text, name)
    body = _INSTANTIATION.sub("", text)
    # the same loops, compiled several times faster
    body = body.replace('_Pragma("clang loop unroll(full)")', "")
    body = _CONSTANT.sub(
        lambda m: f"static const {m[1]} {m[2]} = {int((constants or {}).get(m[2], 0))};",  # type: ignore[call-overload]
        body,
    )
    body = threadgroup_arrays(body, _EXECUTED_ARRAY)
    arguments = ", ".join(_argument(p) for p in parameters)
    return (
        "#include <metal_stdlib>\n#line 1\n" + body + _ENTRY.format(call=call, arguments=arguments)
    )
