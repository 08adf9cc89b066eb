// Conversations that stay in this browser: kept in its IndexedDB, answered through the API.
//
// Nothing of them is kept on the server. The tab that asked receives the answer; it tells the other
// tabs of this browser what it hears, so that they stay in step.
import { call, events, open } from "./api.js";
import { branch } from "./tree.js";

const NAME = "mlx-cb";
const SAVE_EVERY_MS = 1000;
const channel = new BroadcastChannel(NAME);
const answering = new Map(); // conversation id -> AbortController
let tell = () => {};
let owner = null;

/** Begin: `apply` hears the same events as from the server. Each person sees only his own here. */
export function listenHere(user, apply) {
  owner = user;
  tell = apply;
  channel.onmessage = ({ data }) => data.owner === owner && apply(data.event);
}

function publish(event) {
  tell(structuredClone(event)); // what is shown is not what is written to
  channel.postMessage({ owner, event });
}

let database = null;

function whole() {
  database ??= new Promise((done, failed) => {
    const opening = indexedDB.open(NAME, 1);
    opening.onupgradeneeded = () => opening.result.createObjectStore("conversations", { keyPath: "id" });
    opening.onsuccess = () => done(opening.result);
    opening.onerror = () => failed(opening.error);
  });
  return database;
}

async function store(mode, act) {
  const transaction = (await whole()).transaction("conversations", mode);
  return new Promise((done, failed) => {
    const asked = act(transaction.objectStore("conversations"));
    transaction.oncomplete = () => done(asked.result);
    transaction.onerror = transaction.onabort = () => failed(transaction.error);
  });
}

async function read(id) {
  const found = await store("readonly", (all) => all.get(id));
  if (!found || found.owner !== owner) throw new Error("not here");
  for (const message of found.messages) {
    // Whoever was writing it saves every second; silence means that the tab was closed.
    const isAlive = answering.has(id) || Date.now() - found.saved < 5 * SAVE_EVERY_MS;
    if (message.state === "running" && !isAlive) message.state = "interrupted";
  }
  return found;
}

async function write(conversation) {
  conversation.saved = Date.now();
  await store("readwrite", (all) => all.put(conversation));
}

async function mine() {
  const all = await store("readonly", (found) => found.getAll());
  return all.filter((one) => one.owner === owner).sort((a, b) => b.updated - a.updated);
}

const now = () => Date.now() / 1000;
const newId = () => [...crypto.getRandomValues(new Uint8Array(16))]
  .map((byte) => byte.toString(16).padStart(2, "0")).join("");
const summary = ({ id, title, created, updated }) => ({ id, title, created, updated, place: "browser" });
const folded = (text) => text.normalize("NFKC").toLowerCase();

function matching(conversation, wanted) {
  const texts = [conversation.title, ...conversation.messages.map((message) => message.content)];
  return texts.find((text) => folded(text).includes(wanted));
}

export const browser = {
  place: "browser",
  async list(query) {
    const wanted = folded(query.trim());
    const found = (await mine()).filter((one) => !wanted || matching(one, wanted) !== undefined);
    const rows = found.map((one) => wanted ? { ...summary(one), found: around(matching(one, wanted), wanted) } : summary(one));
    const running = found.filter((one) => one.messages.some((m) => m.state === "running")).map((one) => one.id);
    return { conversations: rows, running };
  },
  load: read,
  async begin(settings) {
    const made = { id: newId(), owner, title: "", created: now(), updated: now(), settings, messages: [], leaf: null };
    await write(made);
    publish({ type: "conversation", conversation: summary(made) });
    return made;
  },
  async ask(id, content, parent) {
    const conversation = await read(id);
    const question = { id: newId(), role: "user", content, created: now(), parent };
    if (!conversation.title) conversation.title = title(content);
    conversation.messages.push(question);
    return begin(conversation, question.id, [question]);
  },
  async answer(id, parent) {
    return begin(await read(id), parent, []);
  },
  async stop(id) {
    answering.get(id)?.abort();
    channel.postMessage({ owner, event: { type: "stop", conversation: id } });
  },
  stopped(id) {
    answering.get(id)?.abort();
  },
  async change(id, changes) {
    const conversation = Object.assign(await read(id), changes, { updated: now() });
    await write(conversation);
    const { settings, leaf } = conversation;
    publish({ type: "conversation", conversation: summary(conversation), settings, leaf });
  },
  async remove(id) {
    answering.get(id)?.abort();
    await store("readwrite", (all) => all.delete(id));
    publish({ type: "deleted", conversation: id });
  },
  async removeAll() {
    for (const one of await mine()) await browser.remove(one.id);
  },
  async exportAs(id, form) {
    const conversation = await read(id);
    return form === "md" ? toMarkdown(conversation) : toJson([conversation]);
  },
  async exportAll() {
    return JSON.parse(toJson((await mine()).reverse()));
  },
};

function title(content) {
  const line = content.split("\n").map((text) => text.trim()).find((text) => text) ?? "";
  return line.length <= 60 ? line : `${line.slice(0, 59).trimEnd()}…`;
}

function around(text, wanted) {
  const place = Math.max(0, folded(text).indexOf(wanted));
  const start = Math.max(0, place - 40);
  return (start ? "…" : "") + text.slice(start, place + wanted.length + 40).replace(/\s+/g, " ");
}

async function begin(conversation, parent, before) {
  if (answering.has(conversation.id)) throw new Error("busy");
  const message = { id: newId(), role: "assistant", content: "", reasoning: "", created: now(), parent, state: "running", seq: 0 };
  conversation.messages.push(message);
  conversation.leaf = message.id;
  conversation.updated = now();
  answering.set(conversation.id, new AbortController());
  await write(conversation);
  publish({ type: "conversation", conversation: summary(conversation) });
  publish({ type: "messages", conversation: conversation.id, messages: [...before, message], leaf: message.id });
  make(conversation, message);
  return { answer: message };
}

async function make(conversation, message) {
  const stopping = answering.get(conversation.id);
  const watching = watchWaiting(conversation, message);
  try {
    await receive(conversation, message, stopping.signal, watching);
    message.state = "done";
  } catch (error) {
    message.state = stopping.signal.aborted ? "stopped" : "failed";
    if (message.state === "failed") message.error = error.message;
  }
  watching.end();
  delete message.seq;
  answering.delete(conversation.id);
  // The conversation may have been changed or deleted while the answer came.
  const newest = await read(conversation.id).catch(() => null);
  if (newest) {
    newest.messages = newest.messages.map((one) => (one.id === message.id ? message : one));
    await write(newest);
  }
  publish({ type: "message", conversation: conversation.id, message: { ...message } });
}

async function receive(conversation, message, signal, watching) {
  const began = performance.now();
  let first = 0;
  let saved = began;
  const answer = await open("POST", "/v1/chat/completions", asked(conversation, message.parent), signal);
  watching.requestId = answer.headers.get("x-request-id");
  for await (const chunk of events(answer)) {
    if (chunk.error) throw new Error(chunk.error.message);
    message.model = chunk.model ?? message.model;
    const delta = chunk.choices?.[0]?.delta ?? {};
    const text = delta.content ?? "";
    const reasoning = delta.reasoning_content ?? "";
    if (text || reasoning) {
      first ||= performance.now();
      watching.end();
      message.content += text;
      message.reasoning += reasoning;
      message.seq += 1;
      publish({ type: "delta", conversation: conversation.id, message: message.id, seq: message.seq, text, reasoning });
    }
    const finish = chunk.choices?.[0]?.finish_reason;
    if (finish) message.figures = { ...message.figures, finish };
    if (chunk.usage) Object.assign(message.figures ??= {}, figures(chunk.usage, began, first));
    if (performance.now() - saved > SAVE_EVERY_MS) {
      saved = performance.now();
      const newest = await read(conversation.id);
      newest.messages = newest.messages.map((one) => (one.id === message.id ? message : one));
      await write(newest);
    }
  }
}

function figures(usage, began, first) {
  return {
    completion_tokens: usage.completion_tokens,
    prompt_tokens: usage.prompt_tokens,
    cached_tokens: usage.prompt_tokens_details?.cached_tokens ?? 0,
    first_token_s: first ? (first - began) / 1000 : null,
    seconds: first ? (performance.now() - first) / 1000 : null,
  };
}

function asked(conversation, parent) {
  const { system, model, thinking, ...sampling } = conversation.settings;
  const messages = system?.trim() ? [{ role: "system", content: system }] : [];
  for (const message of branch({ ...conversation, leaf: parent })) {
    const last = messages.at(-1);
    if (message.role === "assistant" && !message.content) continue; // failed, or stopped at once
    if (last?.role === message.role) last.content += `\n\n${message.content}`;
    else messages.push({ role: message.role, content: message.content });
  }
  const body = { ...sampling, messages, stream: true, stream_options: { include_usage: true } };
  if (model) body.model = model;
  if (thinking !== undefined && thinking !== null) body.chat_template_kwargs = { enable_thinking: thinking };
  return body;
}

/** Ask now and then what an answer waits for, until it begins. */
function watchWaiting(conversation, message) {
  const watching = { requestId: null, end: () => clearInterval(timer) };
  const timer = setInterval(async () => {
    if (!watching.requestId) return;
    const { reason } = await call("GET", `/web/waiting/${watching.requestId}`).catch(() => ({}));
    if (reason && !message.content && !message.reasoning) {
      publish({ type: "waiting", conversation: conversation.id, message: message.id, reason });
    }
  }, 1000);
  return watching;
}

function toJson(conversations) {
  const cleaned = conversations.map(({ owner: _, saved: __, ...rest }) => rest);
  return JSON.stringify({ format: "mlx-cb conversations", version: 1, conversations: cleaned }, null, 1);
}

const HEADINGS = { system: "System prompt", user: "Question", reasoning: "Reasoning", assistant: "Answer" };

/** The same form as the server's, so that it can be imported there. */
function toMarkdown(conversation) {
  const section = (kind, text) => `<!-- mlx-cb: ${kind} -->\n## ${HEADINGS[kind]}\n\n${
    text.split("\n").map((line) => (/^\\*<!-- mlx-cb: /.test(line) ? `\\${line}` : line)).join("\n")}\n\n`;
  const pieces = [`# ${conversation.title.replace(/\s+/g, " ") || "Conversation"}\n\n`];
  if (conversation.settings.system) pieces.push(section("system", conversation.settings.system));
  for (const message of branch(conversation)) {
    if (message.reasoning) pieces.push(section("reasoning", message.reasoning));
    pieces.push(section(message.role, message.content));
  }
  return pieces.join("");
}
