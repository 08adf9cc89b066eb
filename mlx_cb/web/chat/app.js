// The whole page: the list of conversations, the one that is shown, and the keys that go with it.
import { Composer, focusComposer } from "./composer.js";
import { AccountDialog, ConfirmDialog, SettingsDialog } from "./dialogs.js";
import { Sidebar } from "./sidebar.js";
import { change, changed, exportOpen, isRunning, show, state, stop } from "./state.js";
import { t } from "./strings.js";
import { Thread } from "./thread.js";
import { html, IconButton, Menu, useEffect, useState } from "./ui.js";

export function App({ round }) {
  const [dialog, setDialog] = useState(null);
  useEffect(() => {
    const onKey = (event) => shortcut(event, dialog);
    document.addEventListener("keydown", onKey);
    return () => document.removeEventListener("keydown", onKey);
  }, [dialog]);
  useEffect(() => {
    document.title = state.open?.title ? `${state.open.title} – mlx-cb` : "mlx-cb";
  });
  if (state.phase !== "ready") return html`<${Beginning} />`;
  const close = () => setDialog(null);
  return html`
    <a class="skip" href="#message" onClick=${(event) => { event.preventDefault(); focusComposer(); }}>${t("skip")}</a>
    <div class=${`page ${state.isListShown ? "list-shown" : ""}`}>
      <${Sidebar} onAccount=${() => setDialog("account")} />
      <button type="button" class="veil" tabindex="-1" aria-hidden="true" onClick=${() => showList(false)} />
      <main class=${state.open === null ? "is-new" : ""}>
        <${Header} onDialog=${setDialog} />
        ${state.isOffline && html`<p class="bar" role="status">${t("offline")}</p>`}
        <${Thread} round=${round} />
        ${state.notice && html`<p class=${`bar ${state.notice.kind}`} role=${state.notice.kind === "wrong" ? "alert" : "status"}>${
          state.notice.text}</p>`}
        <${Composer} key=${state.open?.id ?? "new"} />
      </main>
    </div>
    <p class="for-readers" role="status" aria-live="polite">${state.spoken}</p>
    ${dialog === "settings" && html`<${SettingsDialog} onClose=${close} />`}
    ${dialog === "account" && html`<${AccountDialog} onClose=${close} onRemoveAll=${() => setDialog("removeAll")} />`}
    ${(dialog === "remove" || dialog === "removeAll") && html`<${ConfirmDialog} what=${dialog} onClose=${close} />`}
  `;
}

function Beginning() {
  const text = state.phase === "refused" ? t("notAllowed") : state.isOffline ? t("unreachable") : t("loading");
  return html`<main class="beginning"><p role="status">${text}</p>
    ${state.phase === "refused" && html`<p><a href="/sign-in">${t("toAccount")}</a></p>`}</main>`;
}

function showList(isShown) {
  state.isListShown = isShown;
  changed();
}

function Header({ onDialog }) {
  const [isRenaming, setRenaming] = useState(false);
  const { open } = state;
  const actions = [
    { icon: "download", label: t("exportMd"), run: () => exportOpen("md") },
    { icon: "download", label: t("exportJson"), run: () => exportOpen("json") },
  ];
  return html`<header class="top">
    <span class="narrow-only"><${IconButton} icon="menu" label=${t("openList")} aria-expanded=${state.isListShown}
      onClick=${() => showList(true)} /></span>
    ${isRenaming && open
      ? html`<${TitleField} onDone=${() => setRenaming(false)} />`
      : html`<h1 title=${open?.title || t("untitled")}>
          ${open
            ? html`<button type="button" class="title" aria-label=${`${t("rename")}: ${open.title || t("untitled")}`}
                onClick=${() => setRenaming(true)}>${open.title || t("untitled")}</button>`
            : t("untitled")}
        </h1>`}
    ${open?.place === "browser" && html`<span class="badge">${t("local")}</span>`}
    <span class="gap" />
    ${open && html`<span class="narrow-only"><${IconButton} icon="plus" label=${t("newChat")} onClick=${beginAnew} /></span>`}
    <${IconButton} icon="settings" label=${t("settings")} onClick=${() => onDialog("settings")} />
    ${open && html`<${Menu} icon="download" label=${t("export")} actions=${actions} />`}
    ${open && html`<${IconButton} icon="trash" label=${t("remove")} onClick=${() => onDialog("remove")} />`}
  </header>`;
}

function beginAnew() {
  show(null);
  focusComposer();
}

function TitleField({ onDone }) {
  const finish = (event) => {
    const title = event.target.value.trim();
    if (title && title !== state.open.title) change({ title });
    onDone();
  };
  const onKeyDown = (event) => {
    if (event.isComposing) return;
    if (event.key === "Enter") event.target.blur();
    if (event.key === "Escape") {
      event.stopPropagation();
      onDone();
    }
  };
  return html`<input class="title" aria-label=${t("rename")} defaultValue=${state.open.title} maxlength="120"
    ref=${(field) => field?.focus()} onBlur=${finish} onKeyDown=${onKeyDown} />`;
}

function shortcut(event, dialog) {
  if (dialog !== null || event.isComposing || event.defaultPrevented) return;
  const isCommand = event.ctrlKey || event.metaKey;
  if (event.key === "Escape" && state.isListShown) showList(false);
  else if (event.key === "Escape" && isRunning()) stop();
  else if (isCommand && event.shiftKey && event.key.toLowerCase() === "o") {
    event.preventDefault();
    beginAnew();
  } else if (isCommand && !event.shiftKey && event.key.toLowerCase() === "k") {
    event.preventDefault();
    showList(true);
    setTimeout(() => document.getElementById("search")?.focus());
  }
}

