// Where a message is written; with it the choice of the model and of where the conversation is kept.
import { ask, change, choosePlace, isRunning, settings, shown, state, stop } from "./state.js";
import { t } from "./strings.js";
import { html, Icon, useLayoutEffect, useRef, useState } from "./ui.js";

const TALLEST = 240; // pixels

export function focusComposer() {
  setTimeout(() => document.getElementById("message")?.focus());
}

export function Composer() {
  const [text, setText] = useState("");
  const field = useRef(null);
  useLayoutEffect(() => {
    field.current.style.height = "auto";
    field.current.style.height = `${Math.min(field.current.scrollHeight, TALLEST)}px`;
  }, [text]);
  useLayoutEffect(() => {
    // On a phone the keyboard would cover half of what is to be read.
    if (matchMedia("(pointer: fine)").matches) field.current.focus();
  }, []);
  const send = async (event) => {
    event?.preventDefault();
    if (!text.trim() || isRunning()) return;
    setText("");
    if (!await ask(text)) setText(text);
  };
  const begin = (words) => {
    setText(words);
    focusComposer();
  };
  const onKeyDown = (event) => {
    // Enter also ends the choice of a Japanese word; 229 is what Safari says then.
    if (event.isComposing || event.keyCode === 229) return;
    if (event.key === "Enter" && !event.shiftKey) send(event);
    else if (event.key === "ArrowUp" && !text) editLast(event);
  };
  return html`<form class="composer column" onSubmit=${send}>
    <div class="field">
      <textarea id="message" ref=${field} rows="1" aria-label=${t("message")} placeholder=${t("placeholder")}
        value=${text} onInput=${(event) => setText(event.target.value)} onKeyDown=${onKeyDown} />
      ${isRunning()
        ? html`<button type="button" class="round" aria-label=${t("stop")} title=${t("stop")} onClick=${stop}><${Icon} name="stop" /></button>`
        : html`<button type="submit" class="round" aria-label=${t("send")} title=${t("send")} disabled=${!text.trim()}><${Icon} name="send" /></button>`}
    </div>
    <${Choices} />
    ${state.open === null && !text && html`<${Ideas} onChoice=${begin} />`}
  </form>`;
}

const IDEAS = ["ideaSummary", "ideaMail", "ideaCode", "ideaIdeas"];

/** How a first message may begin; nothing is sent by choosing one. */
function Ideas({ onChoice }) {
  return html`<ul class="ideas" aria-label=${t("ideas")}>${IDEAS.map((name) => html`<li>
    <button type="button" onClick=${() => onChoice(t(`${name}Text`))}>${t(name)}</button></li>`)}</ul>`;
}

function editLast(event) {
  const last = shown().findLast((message) => message.role === "user");
  const button = last && document.querySelector(`[data-id="${last.id}"] .actions button:last-child`);
  if (button && !button.disabled) {
    event.preventDefault();
    button.click();
  }
}

function Choices() {
  const { models } = state.me;
  const chosen = settings().model ?? models[0].id;
  const choose = (event) => change({ settings: { ...settings(), model: event.target.value } });
  return html`<div class="choices">
    <select aria-label=${t("model")} value=${chosen} onChange=${choose}>
      ${models.map((model) => html`<option value=${model.id} selected=${model.id === chosen}>${model.id}</option>`)}
    </select>
    ${state.open === null && html`<select aria-label=${t("where")} value=${state.draft.place}
        onChange=${(event) => choosePlace(event.target.value)}>
      <option value="account" selected=${state.draft.place === "account"}>${t("inAccount")}</option>
      <option value="browser" selected=${state.draft.place === "browser"}>${t("inBrowser")}</option>
    </select>`}
  </div>`;
}
