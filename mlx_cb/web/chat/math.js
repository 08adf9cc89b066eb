// Formulas in Markdown: $…$ and \(…\) in a line, $$…$$ and \[…\] on their own, by KaTeX as MathML,
// which browsers draw and screen readers read, and which needs no style of its own.

let katex = null;
let isLoading = false;
let whenLoaded = () => {};
const LONGEST = 5000;

export function onMath(run) {
  whenLoaded = run;
}

async function load() {
  if (isLoading) return;
  isLoading = true;
  katex = (await import("../vendor/katex.js")).default;
  whenLoaded();
}

function drawn(parser, tex, displayMode) {
  const plain = `<code class="math">${parser.utils.escapeHtml(tex)}</code>`;
  if (tex.length > LONGEST) return plain;
  if (katex === null) {
    load();
    return plain;
  }
  try {
    const made = katex.renderToString(tex, { displayMode, output: "mathml", trust: false, strict: "ignore", maxExpand: 200, maxSize: 20 });
    // The source stands in an annotation, which would be shown where the sanitiser unwraps it.
    return made.replace(/<annotation[^>]*>[\s\S]*?<\/annotation>/g, "").replace(/<\/?semantics>/g, "");
  } catch {
    return plain; // not a formula after all, or one that is still being written
  }
}

/** Find the end of a formula that begins at `from`; -1 when it does not end. */
function endOf(text, from, close) {
  for (let at = from; ; at += 1) {
    at = text.indexOf(close, at);
    if (at < 0) return -1;
    if (close.startsWith("\\") || text[at - 1] !== "\\") return at;
  }
}

const OPENINGS = [["$$", "$$", true], ["\\[", "\\]", true], ["\\(", "\\)", false], ["$", "$", false]];

function inline(state, silent) {
  const { src, pos } = state;
  const opening = OPENINGS.find(([open]) => src.startsWith(open, pos));
  if (opening === undefined) return false;
  const [open, close, isBlock] = opening;
  const start = pos + open.length;
  const end = endOf(src, start, close);
  const tex = end < 0 ? "" : src.slice(start, end);
  if (!tex.trim()) return false;
  // Money is no formula: "$5 and $6", "a $ b".
  if (open === "$" && (/^\s|\s$/.test(tex) || /\d/.test(src[end + 1] ?? ""))) return false;
  if (!silent) {
    const token = state.push("math", "math", 0);
    token.content = tex;
    token.meta = { isBlock };
  }
  state.pos = end + close.length;
  return true;
}

function block(state, first, last, silent) {
  const line = (n) => state.src.slice(state.bMarks[n] + state.tShift[n], state.eMarks[n]);
  const text = line(first).trim();
  const [open, close] = text.startsWith("$$") ? ["$$", "$$"] : text.startsWith("\\[") ? ["\\[", "\\]"] : [];
  if (open === undefined) return false;
  const lines = [];
  let next = first;
  for (; next < last; next += 1) {
    const whole = line(next);
    const part = next === first ? whole.trimStart().slice(open.length) : whole;
    if (part.trimEnd().endsWith(close)) {
      lines.push(part.trimEnd().slice(0, -close.length));
      break;
    }
    lines.push(part);
  }
  if (next >= last || !lines.join("").trim() || lines[0].includes(close)) return false;
  if (silent) return true;
  const token = state.push("math", "math", 0);
  token.content = lines.join("\n").trim();
  token.meta = { isBlock: true };
  token.block = true;
  state.line = next + 1;
  return true;
}

/** The plugin. */
export function math(parser) {
  parser.inline.ruler.before("escape", "math", inline);
  parser.block.ruler.before("fence", "math", block, { alt: ["paragraph", "reference", "blockquote", "list"] });
  parser.renderer.rules.math = (tokens, at) => {
    const { content, meta, block: isOwnBlock } = tokens[at];
    const made = drawn(parser, content, meta.isBlock);
    return isOwnBlock ? `<p>${made}</p>\n` : made;
  };
}
