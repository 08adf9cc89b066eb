// Preact with htm: `html` makes elements from templates, no build step.
import { Component, h, render } from "../vendor/preact.js";
import { useEffect, useLayoutEffect, useRef, useState } from "../vendor/preact-hooks.js";
import htm from "../vendor/htm.js";

export const html = htm.bind(h);
export { Component, render, useEffect, useLayoutEffect, useRef, useState };

const PATHS = {
  menu: "M4 7h16M4 12h16M4 17h16",
  plus: "M12 5v14M5 12h14",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M8 8h8v8H8z",
  copy: "M9 9h10v11H9zM5 15V4h10",
  edit: "M4 20h4L19 9l-4-4L4 16zM13 7l4 4",
  again: "M19 8a8 8 0 1 0 1 5M20 4v5h-5",
  settings: "M4 8h9M19 8h1M4 16h1M11 16h9M16 5.5v5M8 13.5v5",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  download: "M12 4v11M7 11l5 5 5-5M5 20h14",
  upload: "M12 16V5M7 9l5-5 5 5M5 20h14",
  search: "M11 18a7 7 0 1 1 0-14 7 7 0 0 1 0 14zM16 16l5 5",
  left: "M14 6l-6 6 6 6",
  right: "M10 6l6 6-6 6",
  down: "M6 10l6 6 6-6",
  check: "M5 13l4 4L19 7",
  more: "M5 12h.01M12 12h.01M19 12h.01",
  close: "M6 6l12 12M18 6L6 18",
  person: "M12 12a4 4 0 1 0 0-8 4 4 0 0 0 0 8zM4 21c1-5 15-5 16 0",
  lock: "M6 11h12v9H6zM8 11V8a4 4 0 0 1 8 0v3",
};

export function Icon({ name }) {
  return html`<svg class=${`icon icon-${name}`} viewBox="0 0 24 24" aria-hidden="true" focusable="false">
    <path d=${PATHS[name]} />
  </svg>`;
}

/** A button that shows only a picture; its label is for screen readers and as a hint. */
export function IconButton({ icon, label, ...more }) {
  return html`<button type="button" class="icon-button" aria-label=${label} title=${label} ...${more}>
    <${Icon} name=${icon} />
  </button>`;
}

/** A modal dialog: the browser keeps the focus inside and closes it with Escape. */
export function Dialog({ title, closeLabel, onClose, children }) {
  const box = useRef(null);
  useEffect(() => {
    const before = document.activeElement;
    box.current.showModal();
    return () => before?.focus?.();
  }, []);
  const byBackdrop = (event) => event.target === box.current && onClose();
  return html`<dialog ref=${box} aria-labelledby="dialog-title" onClose=${onClose}
      onMouseDown=${byBackdrop}>
    <div class="dialog-body">
      <header>
        <h2 id="dialog-title">${title}</h2>
        <${IconButton} icon="close" label=${closeLabel} onClick=${onClose} />
      </header>
      ${children}
    </div>
  </dialog>`;
}

/** A button that opens a small list of actions: [{label, icon, run}]. */
export function Menu({ icon, label, actions }) {
  const [isOpen, setOpen] = useState(false);
  const box = useRef(null);
  useEffect(() => {
    if (!isOpen) return undefined;
    box.current.querySelector("[role=menuitem]")?.focus();
    const outside = (event) => box.current.contains(event.target) || setOpen(false);
    document.addEventListener("pointerdown", outside);
    return () => document.removeEventListener("pointerdown", outside);
  }, [isOpen]);
  const close = () => {
    setOpen(false);
    box.current.querySelector("button").focus();
  };
  const onKeyDown = (event) => {
    if (!isOpen) return;
    const items = [...box.current.querySelectorAll("[role=menuitem]")];
    const at = items.indexOf(document.activeElement);
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step) items[(at + step + items.length) % items.length].focus();
    else if (event.key === "Escape" || event.key === "Tab") close();
    else return;
    event.preventDefault();
    event.stopPropagation();
  };
  return html`<div class="menu" ref=${box} onKeyDown=${onKeyDown}>
    <${IconButton} icon=${icon} label=${label} aria-haspopup="menu" aria-expanded=${isOpen}
      onClick=${() => setOpen(!isOpen)} />
    ${isOpen && html`<div role="menu" aria-label=${label}>
      ${actions.map((action) => html`<button type="button" role="menuitem" tabindex="-1"
          onClick=${() => { close(); action.run(); }}>
        <${Icon} name=${action.icon} />${action.label}
      </button>`)}
    </div>`}
  </div>`;
}
