// A model's text to safe HTML. Two walls: the parser lets no HTML of the model through, and what it
// makes is sanitised again. (The page's content security policy is the third.)
import DOMPurify from "../vendor/purify.js";
import markdownit from "../vendor/markdown-it.js";
import { math } from "./math.js";

const LANGUAGE = /^[\w+#.-]{1,30}$/;
const SAFE_LINK = /^(https?:\/\/|mailto:)/i;
const MOST_HIGHLIGHTED = 30000; // characters of one block; longer ones stay plain

const CLEANING = {
  USE_PROFILES: { html: true, mathMl: true },
  FORBID_TAGS: ["style", "form", "input", "button", "textarea", "select", "option", "img", "picture",
    "video", "audio", "source", "track", "area", "map", "dialog", "details", "summary", "marquee"],
  FORBID_ATTR: ["style", "id", "name", "srcset", "usemap", "is", "slot", "tabindex", "title", "action"],
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
};

DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  node.removeAttribute("xlink:href");
  const link = node.getAttribute("href");
  if (link === null) return;
  if (node.nodeName !== "A" || !SAFE_LINK.test(link)) {
    node.removeAttribute("href");
    return;
  }
  node.setAttribute("target", "_blank");
  node.setAttribute("rel", "noopener noreferrer nofollow");
  node.setAttribute("title", link); // where it really goes
});

const parser = markdownit({ html: false, linkify: true, breaks: true });
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false });
parser.validateLink = (link) => SAFE_LINK.test(link);
parser.use(math);

// A picture would be fetched from wherever the model says, and tell them so: it becomes a link.
parser.renderer.rules.image = (tokens, at) => {
  const source = tokens[at].attrGet("src") ?? "";
  const words = escape(tokens[at].content || source);
  return SAFE_LINK.test(source) ? `<a href="${escape(source)}">${words}</a>` : words;
};
parser.renderer.rules.fence = (tokens, at) => code(tokens[at].content, tokens[at].info.trim().split(/\s+/)[0]);
parser.renderer.rules.code_block = (tokens, at) => code(tokens[at].content, "");
parser.renderer.rules.table_open = () => '<div class="table"><table>';
parser.renderer.rules.table_close = () => "</table></div>";

const escape = (text) => parser.utils.escapeHtml(text);

let highlighter = null;
let isLoading = false;
let whenLoaded = () => {};

/** What to do when a library that was needed has come: draw again. */
export function onLibrary(run) {
  whenLoaded = run;
}

function code(content, language) {
  const name = LANGUAGE.test(language) ? language : "";
  return `<pre class="code"><code class="language-${escape(name)}">${highlighted(content, name)}</code></pre>`;
}

const done = new Map(); // text -> HTML of the blocks highlighted last

function highlighted(content, language) {
  if (!language || content.length > MOST_HIGHLIGHTED) return escape(content);
  if (highlighter === null) {
    loadHighlighter();
    return escape(content);
  }
  if (!highlighter.getLanguage(language)) return escape(content);
  const key = `${language}\n${content}`;
  if (!done.has(key)) {
    done.set(key, highlighter.highlight(content, { language, ignoreIllegals: true }).value);
    if (done.size > 100) done.delete(done.keys().next().value);
  }
  return done.get(key);
}

async function loadHighlighter() {
  if (isLoading) return;
  isLoading = true;
  highlighter = (await import("../vendor/highlight.js")).default;
  whenLoaded();
}

/** Safe HTML of a text. */
export function toHtml(text) {
  return DOMPurify.sanitize(parser.render(text), CLEANING);
}
