// One message: its text, its reasoning folded away, what it took, and what can be done with it.
import { answerAnew, askInstead, isRunning, showVersion } from "./state.js";
import { language, t } from "./strings.js";
import { toHtml } from "./markdown.js";
import { siblings } from "./tree.js";
import { Component, html, IconButton, useLayoutEffect, useRef, useState } from "./ui.js";

const COPIED_MS = 1500;

/** Drawn anew only when something of it has changed: an answer that grows must not cost the others. */
export class Message extends Component {
  shouldComponentUpdate(next) {
    const before = this.props;
    return next.message !== before.message || next.reason !== before.reason || next.round !== before.round
      || next.conversation.messages.length !== before.conversation.messages.length
      || this.wasRunning !== isRunning() || this.drawnIn !== language;
  }

  render({ message, reason, round, conversation }) {
    this.wasRunning = isRunning();
    this.drawnIn = language;
    return message.role === "user"
      ? html`<${Question} message=${message} conversation=${conversation} />`
      : html`<${Answer} message=${message} reason=${reason} round=${round} conversation=${conversation} />`;
  }
}

function Question({ message, conversation }) {
  const [isEditing, setEditing] = useState(false);
  return html`<article class="question" data-id=${message.id} aria-label=${t("you")}>
    ${isEditing
      ? html`<${Editor} message=${message} onDone=${() => setEditing(false)} />`
      : html`<div class="bubble">${message.content}</div>
        <div class="actions">
          <${Versions} message=${message} conversation=${conversation} />
          <${CopyButton} text=${message.content} />
          <${IconButton} icon="edit" label=${t("edit")} disabled=${isRunning()} onClick=${() => setEditing(true)} />
        </div>`}
  </article>`;
}

function Editor({ message, onDone }) {
  const field = useRef(null);
  useLayoutEffect(() => {
    field.current.focus();
    field.current.setSelectionRange(message.content.length, message.content.length);
  }, []);
  const ask = async (event) => {
    event?.preventDefault();
    const text = field.current.value;
    if (text.trim() && await askInstead(message, text)) onDone();
  };
  const onKeyDown = (event) => {
    if (event.isComposing) return;
    if (event.key === "Escape") {
      event.stopPropagation();
      onDone();
    } else if (event.key === "Enter" && !event.shiftKey) ask(event);
  };
  return html`<form class="editor" onSubmit=${ask}>
    <textarea ref=${field} aria-label=${t("editLabel")} rows="3" defaultValue=${message.content} onKeyDown=${onKeyDown} />
    <div class="row">
      <button type="button" onClick=${onDone}>${t("cancel")}</button>
      <button type="submit" class="main">${t("saveEdit")}</button>
    </div>
  </form>`;
}

function Answer({ message, reason, round, conversation }) {
  const isOngoing = message.state === "running";
  return html`<article class="answer" data-id=${message.id} data-state=${message.state ?? "done"}
      aria-label=${message.model || t("model")} aria-busy=${isOngoing}>
    ${message.reasoning && html`<${Reasoning} message=${message} />`}
    ${message.content && html`<${Text} text=${message.content} round=${round} />`}
    ${isOngoing && !message.content && html`<p class="waits">${
      message.reasoning ? null : waitingText(reason)}</p>`}
    <${Ending} message=${message} />
    ${!isOngoing && html`<div class="actions">
      <${Versions} message=${message} conversation=${conversation} />
      <${CopyButton} text=${message.content} />
      <${IconButton} icon="again" label=${t("regenerate")} disabled=${isRunning()} onClick=${() => answerAnew(message)} />
      <span class="figures">${figures(message)}</span>
    </div>`}
  </article>`;
}

const REASONS = {
  preparing: "waitPreparing", own: "waitOwn", engine: "waitEngine", turn: "waitTurn",
  memory: "waitMemory", reading: "waitReading",
};

function waitingText(reason) {
  if (!reason) return t("sent");
  const parts = [];
  if (reason.people) parts.push(t("ahead", reason.people));
  if (reason.seconds) parts.push(t("about", reason.seconds));
  if (reason.part) parts.push(`${Math.round(reason.part * 100)} %`);
  const words = t(REASONS[reason.what]);
  return parts.length ? `${words} ${parts.join(language === "ja" ? "、" : ", ")}` : words;
}

function Reasoning({ message }) {
  const isThinking = message.state === "running" && !message.content;
  return html`<details class="reasoning">
    <summary>${t(isThinking ? "thinking" : "reasoning")}</summary>
    <div>${message.reasoning.trim()}</div>
  </details>`;
}

function Ending({ message }) {
  if (message.state === "failed") return html`<p class="ending bad" role="alert">${t("failed")} ${message.error}</p>`;
  if (message.state === "stopped" || message.state === "interrupted") return html`<p class="ending">${t(message.state)}</p>`;
  if (message.figures?.finish === "length") return html`<p class="ending">${t("cut")}</p>`;
  return null;
}

function figures({ figures: found }) {
  if (!found?.completion_tokens) return null;
  const parts = [t("tokens", found.completion_tokens)];
  if (found.seconds > 0 && found.completion_tokens > 1) {
    parts.push(t("perSecond", rounded((found.completion_tokens - 1) / found.seconds)));
  }
  if (typeof found.first_token_s === "number") parts.push(t("first", rounded(found.first_token_s)));
  return parts.join(" · ");
}

const rounded = (value) => (value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2));

/** Text as Markdown. What is drawn is replaced only when it has changed. */
function Text({ text, round }) {
  const box = useRef(null);
  const drawn = useRef(null);
  useLayoutEffect(() => {
    const made = toHtml(text);
    if (made === drawn.current) return;
    drawn.current = made;
    box.current.innerHTML = made;
    for (const block of box.current.querySelectorAll("pre.code")) addHead(block);
  }, [text, round, language]);
  return html`<div class="text" ref=${box} />`;
}

/** Above a block of code: its language and a button that copies it. */
function addHead(block) {
  const head = document.createElement("div");
  head.className = "code-head";
  const name = document.createElement("span");
  name.textContent = block.firstElementChild?.className.match(/language-(\S+)/)?.[1] ?? "";
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = t("copy");
  button.addEventListener("click", async () => {
    await copy(block.textContent);
    button.textContent = t("copied");
    setTimeout(() => { button.textContent = t("copy"); }, COPIED_MS);
  });
  head.append(name, button);
  const frame = document.createElement("div");
  frame.className = "code-frame";
  block.replaceWith(frame);
  block.tabIndex = 0; // so that the keyboard can scroll it
  frame.append(head, block);
}

function CopyButton({ text }) {
  const [isDone, setDone] = useState(false);
  const run = async () => {
    await copy(text);
    setDone(true);
    setTimeout(() => setDone(false), COPIED_MS);
  };
  return html`<${IconButton} icon=${isDone ? "check" : "copy"} label=${t(isDone ? "copied" : "copy")} onClick=${run} />`;
}

/** The clipboard is closed to pages without TLS, but a selection can always be copied. */
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const field = document.createElement("textarea");
    field.value = text;
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
  }
}

function Versions({ message, conversation }) {
  const all = siblings(conversation, message);
  if (all.length < 2) return null;
  const at = all.findIndex((one) => one.id === message.id);
  const go = (step) => () => showVersion(all[at + step]);
  return html`<span class="versions">
    <${IconButton} icon="left" label=${t("previous")} disabled=${at === 0 || isRunning()} onClick=${go(-1)} />
    <span>${t("version", at + 1, all.length)}</span>
    <${IconButton} icon="right" label=${t("next")} disabled=${at === all.length - 1 || isRunning()} onClick=${go(1)} />
  </span>`;
}

