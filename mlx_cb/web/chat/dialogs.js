// Settings of a conversation, the account, and questions before something is deleted.
import { bringIn, change, changed, exportAll, remove, removeAll, settings, state } from "./state.js";
import { language, recall, remember, setLanguage, t } from "./strings.js";
import { Dialog, html, useRef } from "./ui.js";

const NUMBERS = [
  ["temperature", "temperature", { min: 0, max: 2, step: 0.05 }],
  ["top_p", "topP", { min: 0, max: 1, step: 0.01 }],
  ["top_k", "topK", { min: 0, step: 1 }],
  ["min_p", "minP", { min: 0, max: 1, step: 0.01 }],
  ["repetition_penalty", "repetition", { min: 0.5, max: 2, step: 0.01 }],
  ["max_tokens", "maxTokens", { min: 1, step: 1 }],
  ["seed", "seed", { min: 0, step: 1 }],
];
const THINKING = { auto: null, on: true, off: false };

export function SettingsDialog({ onClose }) {
  const form = useRef(null);
  const given = settings();
  const thinking = Object.keys(THINKING).find((name) => THINKING[name] === (given.thinking ?? null));
  const save = async (event) => {
    event.preventDefault();
    const fields = new FormData(form.current);
    const made = { model: given.model ?? null, system: fields.get("system") };
    for (const [name] of NUMBERS) made[name] = fields.get(name) === "" ? null : Number(fields.get(name));
    if (fields.has("thinking")) made.thinking = THINKING[fields.get("thinking")];
    for (const name of Object.keys(made)) if (made[name] === null) delete made[name];
    if (await change({ settings: made })) onClose();
  };
  return html`<${Dialog} title=${t("settings")} closeLabel=${t("close")} onClose=${onClose}>
    <form ref=${form} onSubmit=${save}>
      <label class="wide">${t("system")}
        <textarea name="system" rows="4" defaultValue=${given.system ?? ""} aria-describedby="system-hint" />
      </label>
      <p class="hint" id="system-hint">${t("systemHint")}</p>
      <div class="grid">
        ${NUMBERS.map(([name, word, range]) => html`<label>${t(word)}
          <input type="number" name=${name} defaultValue=${given[name] ?? ""} placeholder=${t("modelDefault")}
            inputmode="decimal" ...${range} />
        </label>`)}
        ${state.me.has_reasoning && html`<label>${t("thinkingChoice")}
          <select name="thinking">
            ${Object.keys(THINKING).map((name) => html`<option value=${name} selected=${name === thinking}>${t(name)}</option>`)}
          </select>
        </label>`}
      </div>
      <p class="hint">${t("samplingHint")}</p>
      <div class="row">
        <button type="button" onClick=${onClose}>${t("cancel")}</button>
        <button type="submit" class="main">${t("save")}</button>
      </div>
    </form>
  </${Dialog}>`;
}

export function AccountDialog({ onClose, onRemoveAll }) {
  const file = useRef(null);
  const isLocal = state.me.user === "local";
  const take = async (event) => {
    const [chosen] = event.target.files;
    if (!chosen) return;
    onClose();
    await bringIn(chosen);
  };
  return html`<${Dialog} title=${t("account")} closeLabel=${t("close")} onClose=${onClose}>
    <p>${isLocal ? t("localUser") : t("signedIn", state.me.user)}</p>
    <p class="links">
      ${!isLocal && html`<a href="/sign-in">${t("toAccount")}</a>`}
      ${state.me.is_admin && html`<a href="/admin">${t("toAdmin")}</a>`}
    </p>
    <div class="grid">
      <label>${t("theme")}<${ThemeChoice} /></label>
      <label>${t("language")}
        <select onChange=${(event) => { setLanguage(event.target.value); changed(); }}>
          <option value="en" selected=${language === "en"}>English</option>
          <option value="ja" selected=${language === "ja"}>日本語</option>
        </select>
      </label>
    </div>
    <h3>${t("data")}</h3>
    <div class="row left">
      <button type="button" onClick=${() => file.current.click()}>${t("importFile")}</button>
      <input ref=${file} type="file" accept=".json,.md,.markdown" hidden onChange=${take} aria-label=${t("importFile")} />
      <button type="button" onClick=${exportAll}>${t("exportAll")}</button>
      <button type="button" class="bad" onClick=${onRemoveAll}>${t("removeAll")}</button>
    </div>
    <h3>${t("keys")}</h3>
    <dl class="keys">
      ${[["Enter", "keySend"], ["Shift Enter", "keyLine"], ["Ctrl/⌘ Shift O", "keyNew"], ["Ctrl/⌘ K", "keySearch"],
        ["Esc", "keyStop"], ["↑", "keyEdit"]].map(([keys, word]) => html`<div><dt>${
          keys.split(" ").map((key) => html`<kbd>${key}</kbd>`)}</dt><dd>${t(word)}</dd></div>`)}
    </dl>
  </${Dialog}>`;
}

function ThemeChoice() {
  const chosen = recall("theme") ?? "auto";
  const choose = (event) => {
    const name = event.target.value;
    remember("theme", name === "auto" ? null : name);
    if (name === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = name;
    changed();
  };
  return html`<select onChange=${choose}>
    ${[["auto", "themeAuto"], ["light", "light"], ["dark", "dark"]].map(([name, word]) =>
      html`<option value=${name} selected=${name === chosen}>${t(word)}</option>`)}
  </select>`;
}

export function ConfirmDialog({ what, onClose }) {
  const act = async () => {
    onClose();
    await (what === "removeAll" ? removeAll() : remove());
  };
  return html`<${Dialog} title=${t(`${what}Title`)} closeLabel=${t("close")} onClose=${onClose}>
    <p>${t(`${what}Text`)}</p>
    <div class="row">
      <button type="button" onClick=${onClose}>${t("cancel")}</button>
      <button type="button" class="main bad" onClick=${act}>${t("remove")}</button>
    </div>
  </${Dialog}>`;
}
