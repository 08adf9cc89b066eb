// The messages of the branch that is shown, kept at its end while the person is there.
import { Message } from "./message.js";
import { shown, state } from "./state.js";
import { t } from "./strings.js";
import { html, IconButton, useEffect, useLayoutEffect, useRef, useState } from "./ui.js";

const NEAR = 80; // pixels from the end that still count as being there

export function Thread({ round }) {
  const box = useRef(null);
  const isAtEnd = useRef(true);
  const lastId = useRef(null);
  const [isAway, setAway] = useState(false);
  const messages = shown();
  const lastAsked = messages.findLast((message) => message.role === "user");
  useLayoutEffect(() => {
    // A question just asked, and a conversation just opened, are shown whole.
    if (lastAsked?.id !== lastId.current) isAtEnd.current = true;
    lastId.current = lastAsked?.id;
    if (isAtEnd.current) box.current.scrollTop = box.current.scrollHeight;
  });
  useEffect(() => {
    // Formulas and code grow after they were drawn; so does the page of a phone with its keyboard.
    const watching = new ResizeObserver(() => {
      if (isAtEnd.current) box.current.scrollTop = box.current.scrollHeight;
    });
    watching.observe(box.current);
    watching.observe(box.current.firstElementChild);
    return () => watching.disconnect();
  }, []);
  const onScroll = () => {
    const { scrollTop, scrollHeight, clientHeight } = box.current;
    isAtEnd.current = scrollHeight - scrollTop - clientHeight < NEAR;
    setAway(!isAtEnd.current);
  };
  const toEnd = () => {
    isAtEnd.current = true;
    box.current.scrollTo({ top: box.current.scrollHeight, behavior: "smooth" });
  };
  return html`<div class="thread-box">
    <div class="thread" ref=${box} onScroll=${onScroll} tabindex="0" role="region" aria-label=${t("thread")}>
      <div class="column">
        ${state.open === null && html`<${Welcome} />`}
        ${state.isOpening && html`<p class="hint">${t("loading")}</p>`}
        ${messages.map((message) => html`<${Message} key=${message.id} message=${message} round=${round}
          reason=${state.waiting[message.id]} conversation=${state.open} />`)}
      </div>
    </div>
    ${isAway && html`<span class="to-end"><${IconButton} icon="down" label=${t("toEnd")} onClick=${toEnd} /></span>`}
  </div>`;
}

function Welcome() {
  return html`<div class="welcome">
    <img src="/static/icon.svg" alt="" />
    <h2>${t("hello")}</h2>
    <p>${t(state.draft.place === "browser" ? "helloBrowser" : "helloAccount")}</p>
  </div>`;
}
