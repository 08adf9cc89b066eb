"""What a model could be made to write, to run a script in the page of whoever reads it."""

from __future__ import annotations

_HTML = """
<script>window.ran = 1</script>
<img src=x onerror="window.ran = 2">
<svg onload="window.ran = 3"><script>window.ran = 4</script></svg>
<svg><animate onbegin="window.ran = 5" attributeName=x dur=1s></svg>
<iframe src="javascript:parent.ran = 6"></iframe>
<iframe srcdoc="<script>parent.ran = 7</script>"></iframe>
<a href="javascript:window.ran = 8" id="click">a link</a>
<details open ontoggle="window.ran = 9"><summary>s</summary></details>
<form action="/web/conversations" method="post"><input autofocus onfocus="window.ran = 10"></form>
<math><mtext><table><mglyph><style><img src=x onerror="window.ran = 11"></style></mglyph></table>
</mtext></math>
<math href="javascript:window.ran = 12">click</math>
<noscript><p title="</noscript><img src=x onerror=window.ran=13>"></noscript>
<style>@import url("https://evil.example/x.css"); body { display: none }</style>
<link rel="stylesheet" href="https://evil.example/x.css">
<meta http-equiv="refresh" content="0; url=https://evil.example/">
<base href="https://evil.example/">
<object data="data:text/html,<script>window.ran = 14</script>"></object>
<embed src="javascript:window.ran = 15">
<video><source onerror="window.ran = 16"></video>
<div id="app" name="message" style="position:fixed;inset:0" onclick="window.ran = 17">covered</div>
<template><script>window.ran = 18</script></template>
<xss onpointerrawupdate="window.ran = 19" style="display:block">x</xss>
"""

_MARKDOWN = r"""
[a](javascript:window.ran=20) [b](JaVaScRiPt:window.ran=21) [c](&#106;avascript:window.ran=22)
[d](data:text/html,<script>window.ran=23</script>) [e](vbscript:msgbox) [f](//evil.example/f)
[g](<javascript:window.ran=24>) [h](java&#x09;script:window.ran=25) [i](/web/export)
[j](file:///etc)
[k](https://example.com/" onmouseover="window.ran=26) [l](blob:https://evil.example/1)
![track](https://evil.example/pixel.png) ![x](javascript:window.ran=27) 
![y](x" onerror="window.ran=28)
<javascript:window.ran=29> <https://example.com/ok> https://example.com/bare
[ref]: javascript:window.ran=30 "title"
[ref] [ok](mailto:a@example.com "x\" onclick=\"window.ran=31")

```"><script>window.ran = 32</script>
</code></pre><script>window.ran = 33</script>
```

```python" onmouseover="window.ran=34
print("<img src=x onerror='window.ran = 35'>")
```

```html
<script>window.ran = 36</script><img src=x onerror="window.ran = 37">
```

| <img src=x onerror=window.ran=38> | `<script>window.ran=39</script>` |
|---|---|
| a | b |

# <img src=x onerror=window.ran=40>
"""

_MATHS = r"""
$\href{javascript:window.ran=41}{click}$ $\url{javascript:window.ran=42}$
$\htmlId{app}{x}$ $\htmlStyle{position:fixed}{x}$ $\htmlData{a=b}{x}$ $\htmlClass{list}{x}$
$\includegraphics{https://evil.example/x.png}$
$\text{<img src=x onerror=window.ran=43>}$ $<script>window.ran=44</script>$
$$\def\a{\a\a}\a$$
$$\unicode{x3c}script\unicode{x3e}$$
\(x</math><script>window.ran=45</script>\)
"""

HOSTILE = f"{_HTML}\n{_MARKDOWN}\n{_MATHS}\nEND"
