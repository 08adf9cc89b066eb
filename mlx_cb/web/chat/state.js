// What the page shows, and every way to change it. The two places that keep conversations, the
// account and this browser, answer to the same names and tell of changes by the same events.
import { account, listen } from "./account.js";
import { ApiError, call } from "./api.js";
import { browser, listenHere } from "./browser.js";
import { recall, remember, t } from "./strings.js";
import { branch, leafBelow } from "./tree.js";

export const state = {
  phase: "loading", // loading, ready, refused
  me: null,
  rows: [], // the list: {id, title, updated, place, found?}
  running: new Set(), // ids of conversations whose answer is being made
  query: "",
  open: null, // the conversation that is shown, with its place; null for a new one
  isOpening: false,
  draft: { place: recall("place") === "browser" ? "browser" : "account", settings: {} },
  waiting: {}, // message id -> what it waits for
  isOffline: false,
  notice: null, // {text, kind: "wrong" or "done"}
  spoken: "", // read out by screen readers
  isListShown: false, // on narrow screens
};

const PLACES = { account, browser };
const watchers = new Set();
let isPlanned = false;

/** Draw again, once, soon. */
export function changed() {
  if (isPlanned) return;
  isPlanned = true;
  requestAnimationFrame(() => {
    isPlanned = false;
    for (const draw of watchers) draw();
  });
}

export function watch(draw) {
  watchers.add(draw);
}

/** Run something the person asked for; what goes wrong is said. */
export async function attempt(action) {
  try {
    return await action();
  } catch (error) {
    say(error instanceof TypeError ? t("unreachable") : error.message);
    return null;
  }
}

let noticeTimer = 0;

export function say(text, kind = "wrong") {
  state.notice = { text, kind };
  clearTimeout(noticeTimer);
  noticeTimer = setTimeout(() => {
    state.notice = null;
    changed();
  }, 8000);
  changed();
}

const placeOf = (id) => state.rows.find((row) => row.id === id)?.place
  ?? (state.open?.id === id ? state.open.place : null);

export async function start() {
  try {
    state.me = await call("GET", "/web/me");
  } catch (error) {
    if (error instanceof ApiError && error.status === 401) return; // on the way to the sign-in page
    state.phase = error instanceof ApiError && error.status === 403 ? "refused" : "loading";
    state.isOffline = state.phase === "loading";
    changed();
    if (state.phase === "loading") setTimeout(start, 2000);
    return;
  }
  state.phase = "ready";
  listenHere(state.me.user, (event) => apply(event, "browser"));
  listen((event) => apply(event, "account"), (isConnected) => {
    state.isOffline = !isConnected;
    changed();
  });
  addEventListener("hashchange", openFromAddress);
  await refreshList();
  await openFromAddress();
  pollUntilLoaded();
}

/** A server that still loads its model is asked again until it has. */
async function pollUntilLoaded() {
  while (!state.me.is_ready) {
    await new Promise((done) => setTimeout(done, 2000));
    state.me = (await call("GET", "/web/me").catch(() => null)) ?? state.me;
    changed();
  }
}

export async function refreshList() {
  const query = state.query;
  const lists = await Promise.all([
    account.list(query).catch(() => null),
    browser.list(query).catch(() => ({ conversations: [], running: [] })),
  ]);
  if (lists[0] === null || query !== state.query) return;
  const rows = lists.flatMap((list, n) =>
    list.conversations.map((row) => ({ ...row, place: n === 0 ? "account" : "browser" })));
  state.rows = rows.sort((a, b) => b.updated - a.updated);
  state.running = new Set(lists.flatMap((list) => list.running));
  changed();
}

export function search(text) {
  state.query = text;
  refreshList();
  changed();
}

const idInAddress = () => location.hash.match(/^#\/c\/([0-9a-f]{32})$/)?.[1] ?? null;

async function openFromAddress() {
  const id = idInAddress();
  state.isListShown = false;
  if (id === null) {
    state.open = null;
    changed();
    return;
  }
  if (state.open?.id !== id) await reload(id);
}

let loading = null; // {id, missed}: what happens to a conversation while it is read

async function reload(id) {
  if (loading?.id === id) return undefined;
  const own = loading = { id, missed: [], isOld: false };
  state.isOpening = state.open?.id !== id;
  changed();
  const found = await loadFrom(placeOf(id) ? [placeOf(id)] : ["account", "browser"], id);
  if (loading === own) loading = null;
  if (own.isOld && idInAddress() === id) return reload(id);
  if (idInAddress() !== id) return undefined;
  state.isOpening = false;
  if (found === null) {
    say(t("notHere"));
    show(null);
  } else {
    state.open = found;
    // What came meanwhile may be in what was read or not: every event may be applied twice.
    for (const event of own.missed) apply(event, found.place);
  }
  changed();
  return undefined;
}

async function loadFrom(places, id) {
  for (const place of places) {
    const found = await PLACES[place].load(id).catch(() => null);
    if (found !== null) return { ...found, place };
  }
  return null;
}

/** Go to a conversation, or to a new one. */
export function show(id) {
  state.isListShown = false;
  const target = id === null ? "#/" : `#/c/${id}`;
  if (location.hash === target) changed();
  else location.hash = target;
  if (id === null) state.draft = { ...state.draft, settings: {} };
}

export function apply(event, place) {
  const isOpen = state.open !== null && state.open.id === event.conversation;
  if (loading !== null && loading.id === event.conversation) loading.missed.push(event);
  switch (event.type) {
    case "hello":
    case "again":
      refreshList();
      // What was read before this page could hear may be old already.
      if (loading !== null) loading.isOld = true;
      else if (state.open?.place === place) reload(state.open.id);
      break;
    case "conversation":
      noteRow({ ...event.conversation, place });
      if (state.open?.id === event.conversation.id) noteConversation(event);
      break;
    case "deleted":
      state.rows = state.rows.filter((row) => row.id !== event.conversation);
      if (isOpen) show(null);
      break;
    case "messages":
      state.running.add(event.conversation);
      if (isOpen) addMessages(event);
      break;
    case "delta":
      if (isOpen) addDelta(event);
      break;
    case "waiting":
      state.waiting[event.message] = event.reason;
      break;
    case "message":
      state.running.delete(event.conversation);
      delete state.waiting[event.message.id];
      if (isOpen) replaceMessage(event.message, true);
      break;
    case "stop":
      browser.stopped(event.conversation);
      break;
  }
  changed();
}

function noteRow(row) {
  const found = state.rows.find((one) => one.id === row.id);
  if (state.query.trim() && !found) return;
  state.rows = [{ ...found, ...row }, ...state.rows.filter((one) => one.id !== row.id)]
    .sort((a, b) => b.updated - a.updated);
}

function noteConversation({ conversation, settings, leaf }) {
  state.open = { ...state.open, title: conversation.title };
  if (settings) state.open.settings = settings;
  if (leaf) state.open.leaf = leaf;
}

function addMessages({ messages, leaf }) {
  const known = new Set(state.open.messages.map((message) => message.id));
  const added = messages.filter((message) => !known.has(message.id));
  state.open = { ...state.open, messages: [...state.open.messages, ...added], leaf };
  if (added.length) state.spoken = t("writing");
}

function addDelta(event) {
  const message = state.open.messages.find((one) => one.id === event.message);
  if (message === undefined || event.seq > (message.seq ?? 0) + 1) {
    reload(state.open.id); // something was missed
    return;
  }
  if (message.state !== "running" || event.seq <= message.seq) return;
  replaceMessage({
    ...message,
    content: message.content + event.text,
    reasoning: (message.reasoning ?? "") + event.reasoning,
    seq: event.seq,
  });
}

function replaceMessage(message, isEnd = false) {
  const messages = state.open.messages.map((one) => (one.id === message.id ? message : one));
  state.open = { ...state.open, messages };
  if (isEnd) state.spoken = t(message.state === "done" ? "finished" : message.state);
}

/** The settings that count: of the conversation, or of the one that is about to begin. */
export const settings = () => state.open?.settings ?? state.draft.settings;

export const isRunning = () => state.open !== null && state.running.has(state.open.id);

export function choosePlace(place) {
  state.draft = { ...state.draft, place };
  remember("place", place);
  changed();
}

/** Ask a question, in a new conversation if none is open. Returns whether it was taken. */
export async function ask(content) {
  return attempt(async () => {
    if (state.open === null) {
      const { place } = state.draft;
      const made = await PLACES[place].begin(state.draft.settings);
      state.open = { ...made, place };
      noteRow({ id: made.id, title: "", created: made.created, updated: made.updated, place });
      show(made.id);
    }
    await askAfter(state.open.leaf ?? null, content);
    return true;
  });
}

async function askAfter(parent, content) {
  const { id, place } = state.open;
  const made = await PLACES[place].ask(id, content, parent);
  // A short answer may have ended, and this page have heard of it, before this reply is read.
  const isKnown = state.open?.messages.some((message) => message.id === made.answer.id);
  if (made.question && state.open?.id === id && !isKnown) {
    apply({ type: "messages", conversation: id, messages: [made.question, made.answer], leaf: made.answer.id }, place);
  }
}

/** Ask an earlier question in other words: a new branch from there on. */
export const askInstead = (message, content) => attempt(async () => {
  await askAfter(message.parent ?? null, content);
  return true;
});

export const answerAnew = (message) =>
  attempt(() => PLACES[state.open.place].answer(state.open.id, message.parent));

export const stop = () => attempt(() => PLACES[state.open.place].stop(state.open.id));

export const showVersion = (message) =>
  change({ leaf: leafBelow(state.open, message) });

export function change(changes) {
  if (state.open === null) {
    Object.assign(state.draft, changes);
    changed();
    return Promise.resolve(true);
  }
  return attempt(async () => {
    await PLACES[state.open.place].change(state.open.id, changes);
    state.open = { ...state.open, ...changes };
    changed();
    return true;
  });
}

export const remove = () => attempt(async () => {
  const { id, place } = state.open;
  await PLACES[place].remove(id);
  apply({ type: "deleted", conversation: id }, place);
});

export const removeAll = () => attempt(async () => {
  await account.removeAll();
  await browser.removeAll();
  show(null);
  await refreshList();
});

export const shown = () => (state.open === null ? [] : branch(state.open));

export async function exportOpen(form) {
  const text = await attempt(() => PLACES[state.open.place].exportAs(state.open.id, form));
  const name = (state.open?.title || t("untitled")).replace(/[^\p{L}\p{N} ._-]+/gu, " ").trim();
  if (text !== null) download(text, `${name || "conversation"}.${form}`, form === "md" ? "text/markdown" : "application/json");
}

export async function exportAll() {
  const both = await attempt(() => Promise.all([account.exportAll(), browser.exportAll().catch(() => ({ conversations: [] }))]));
  if (both === null) return;
  const conversations = both.flatMap((bundle) => bundle.conversations);
  download(JSON.stringify({ ...both[0], conversations }, null, 1), "conversations.json", "application/json");
}

function download(text, name, type) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

export async function bringIn(file) {
  const text = await file.text();
  const isMarkdown = /\.(md|markdown)$/i.test(file.name);
  const made = await attempt(() => account.bringIn(isMarkdown ? { markdown: text } : { json: text }));
  if (made === null) return;
  await refreshList();
  say(t("imported", made.conversations.length), "done");
  if (made.conversations.length === 1) show(made.conversations[0].id);
}
