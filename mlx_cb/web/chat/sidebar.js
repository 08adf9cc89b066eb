// The list of conversations, its search, and the way to the account.
import { focusComposer } from "./composer.js";
import { changed, search, show, state } from "./state.js";
import { t } from "./strings.js";
import { html, Icon, IconButton } from "./ui.js";

export function Sidebar({ onAccount }) {
  const isNarrow = matchMedia("(max-width: 760px)").matches;
  const begin = () => {
    show(null);
    focusComposer();
  };
  return html`<nav class="list" aria-label=${t("conversations")} inert=${isNarrow && !state.isListShown}>
    <div class="list-head">
      <button type="button" class="new" onClick=${begin}><${Icon} name="plus" />${t("newChat")}</button>
      <span class="narrow-only"><${IconButton} icon="close" label=${t("closeList")}
        onClick=${() => { state.isListShown = false; changed(); }} /></span>
    </div>
    <div class="search">
      <${Icon} name="search" />
      <input id="search" type="search" aria-label=${t("search")} placeholder=${t("search")}
        value=${state.query} onInput=${(event) => search(event.target.value)} />
    </div>
    <div class="rows">${groups(state.rows).map(({ when, rows }) => html`<section key=${when} aria-label=${t(when)}>
      <h2>${t(when)}</h2>
      <ul>${rows.map((row) => html`<${Row} key=${row.id} row=${row} />`)}</ul>
    </section>`)}</div>
    ${state.rows.length === 0 && html`<p class="hint" role="status">${t(state.query ? "noneFound" : "noneYet")}</p>`}
    <button type="button" class="account" onClick=${onAccount} aria-label=${`${t("account")}: ${state.me.user}`}>
      <${Icon} name="person" /><span>${state.me.user}</span><${Icon} name="more" />
    </button>
  </nav>`;
}

/** The rows by when they were last changed, newest first: [{when, rows}]. */
function groups(rows) {
  const midnight = new Date().setHours(0, 0, 0, 0) / 1000;
  const since = [["today", midnight], ["yesterday", midnight - 86400], ["week", midnight - 7 * 86400], ["older", -Infinity]];
  const found = [];
  for (const row of rows) {
    const [when] = since.find(([, start]) => row.updated >= start);
    if (found.at(-1)?.when !== when) found.push({ when, rows: [] });
    found.at(-1).rows.push(row);
  }
  return found;
}

function Row({ row }) {
  const isOpen = state.open?.id === row.id;
  const open = () => {
    state.isListShown = false;
    changed();
  };
  return html`<li>
    <a href=${`#/c/${row.id}`} aria-current=${isOpen ? "page" : null} onClick=${open}>
      <span class="row-title">${row.title || t("untitled")}</span>
      ${row.place === "browser" && html`<span title=${t("local")}><${Icon} name="lock" /></span>`}
      ${state.running.has(row.id) && html`<span class="dot" role="img" aria-label=${t("answering")} />`}
      ${state.query && row.found && html`<span class="found">${row.found}</span>`}
    </a>
  </li>`;
}
