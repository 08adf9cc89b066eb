// Conversations in the person's account: the server keeps them and makes the answers.
import { ApiError, call, events, open } from "./api.js";

const at = (id) => `/web/conversations/${encodeURIComponent(id)}`;
const FIRST_PAUSE_MS = 500;
const LONGEST_PAUSE_MS = 10000;

export const account = {
  place: "account",
  list: (query) => call("GET", `/web/conversations?q=${encodeURIComponent(query)}`),
  load: (id) => call("GET", at(id)),
  begin: (settings) => call("POST", "/web/conversations", { settings }),
  ask: (id, content, parent) => call("POST", `${at(id)}/messages`, { content, parent }),
  answer: (id, parent) => call("POST", `${at(id)}/answers`, { parent }),
  stop: (id) => call("POST", `${at(id)}/stop`),
  change: (id, changes) => call("PATCH", at(id), changes),
  remove: (id) => call("DELETE", at(id)),
  removeAll: () => call("DELETE", "/web/conversations"),
  bringIn: (file) => call("POST", "/web/import", file),
  exportAs: async (id, form) => (await open("GET", `${at(id)}/export?format=${form}`)).text(),
  exportAll: async () => JSON.parse(await (await open("GET", "/web/export")).text()),
};

/**
 * Hear of everything that changes, for as long as the page is looked at.
 *
 * A page in the background gives its connection back after a while: browsers allow only six to
 * one server. On coming back everything is read anew, as after every break.
 */
export async function listen(apply, onState) {
  let pause = FIRST_PAUSE_MS;
  for (;;) {
    await untilVisible();
    const stopping = new AbortController();
    const hide = watchHiding(() => stopping.abort());
    try {
      for await (const event of events(await open("GET", "/web/events", undefined, stopping.signal))) {
        pause = FIRST_PAUSE_MS;
        if (event.type === "hello") onState(true);
        apply(event);
      }
    } catch (error) {
      if (error instanceof ApiError && (error.status === 401 || error.status === 403)) return;
      if (!stopping.signal.aborted) onState(false);
    } finally {
      hide();
    }
    await new Promise((done) => setTimeout(done, pause));
    pause = Math.min(pause * 2, LONGEST_PAUSE_MS);
  }
}

const HIDDEN_MS = 20000;

function watchHiding(run) {
  let timer = 0;
  const look = () => {
    clearTimeout(timer);
    if (document.hidden) timer = setTimeout(run, HIDDEN_MS);
  };
  document.addEventListener("visibilitychange", look);
  look();
  return () => {
    clearTimeout(timer);
    document.removeEventListener("visibilitychange", look);
  };
}

function untilVisible() {
  if (!document.hidden) return Promise.resolve();
  return new Promise((done) => {
    const look = () => {
      if (document.hidden) return;
      document.removeEventListener("visibilitychange", look);
      done();
    };
    document.addEventListener("visibilitychange", look);
  });
}
