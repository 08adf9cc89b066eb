// How a browser comes in: by a key, by a link for somebody, or by a link and an admin's word.
// A link's secret stands behind the # of the address, so it is sent only in a body.

const WORDS = {
  en: {
    title: "Sign in", hello: "You are", key: "Your key", signIn: "Sign in",
    keyHint: "Whoever runs this server gave you a key that begins with mcb_, or can send you a link.",
    name: "Your name", ask: "Ask to be let in",
    nameHint: "Letters, digits and . _ @ - ; that is how you are called here.",
    waiting: "Waiting to be let in", codeHint: "Tell this number to whoever runs the server. This page goes on by itself.",
    today: "Today", usage: "{requests} requests, {input} tokens read ({cached} of them known already), {output} written, {seconds} s of the machine",
    toChat: "Chat", toAdmin: "Operator's page", programs: "For editors and programs",
    programsHint: "A new key for them is shown once; the one before ends, and so do your other browsers.",
    newKey: "Make a key", browsers: "Browsers", signOut: "Sign out", signOutAll: "Sign out everywhere",
    noKeys: "No sign-in is needed: this server has no keys, everyone on this machine is one user.",
    refused: "This page is not for you", otherKey: "Sign in with another key",
    forAdmins: "You are signed in as {user}. This page is for whoever runs the server: ask them for an admin's key if you are to help with that.",
    forModel: "You are signed in as {user}, whose key does not carry the right to use the model. Whoever runs the server can give you one that does.",
    opening: "One moment …", failed: "The server cannot be reached; try again.",
  },
  ja: {
    title: "サインイン", hello: "サインイン中:", key: "キー", signIn: "サインイン",
    keyHint: "管理者から受け取った mcb_ で始まるキーを入力するか、リンクを送ってもらってください。",
    name: "お名前", ask: "参加を申請する",
    nameHint: "英数字と . _ @ - が使えます。ここでの呼び名になります。",
    waiting: "承認を待っています", codeHint: "この番号を管理者に伝えてください。承認されるとこのページが自動的に進みます。",
    today: "今日の利用", usage: "リクエスト {requests} 件、入力 {input} トークン(うちキャッシュ {cached})、出力 {output} トークン、マシン時間 {seconds} 秒",
    toChat: "チャット", toAdmin: "管理ページ", programs: "エディタやプログラム用",
    programsHint: "新しいキーは一度だけ表示されます。以前のキーと他のブラウザのサインインは無効になります。",
    newKey: "キーを作る", browsers: "ブラウザ", signOut: "サインアウト", signOutAll: "すべてサインアウト",
    noKeys: "サインインは不要です。このサーバーにはキーがなく、このマシンの全員が同じユーザーです。",
    refused: "このページは開けません", otherKey: "別のキーでサインイン",
    forAdmins: "{user} としてサインイン中です。このページはサーバーの管理者用です。管理を手伝う場合は、管理者用のキーをもらってください。",
    forModel: "{user} としてサインイン中ですが、このキーではモデルを使えません。使えるキーを管理者からもらってください。",
    opening: "お待ちください…", failed: "サーバーに接続できません。もう一度お試しください。",
  },
};
// What was chosen in the chat on this browser.
const chosen = (name) => {
  try {
    return localStorage.getItem(`mlx-cb.${name}`);
  } catch {
    return null; // storage is forbidden
  }
};
const language = chosen("language") ?? (navigator.language.startsWith("ja") ? "ja" : "en");
if (["light", "dark"].includes(chosen("theme"))) document.documentElement.style.colorScheme = chosen("theme");
const words = WORDS[language] ?? WORDS.en;
const at = (id) => document.getElementById(id);
const ASK_EVERY_MS = 1500;

document.documentElement.lang = language;
for (const element of document.querySelectorAll("[data-say]")) {
  element.textContent = words[element.dataset.say];
}

function show(id, lead) {
  for (const part of ["by-key", "by-name", "waiting", "account", "refused"]) at(part).hidden = part !== id;
  at("lead").textContent = lead ?? "";
  at("title").textContent = id === "account" ? "mlx-cb" : words.title;
  document.title = `${words.title} – mlx-cb`;
  at("error").textContent = "";
  at(id)?.querySelector("input")?.focus();
}

async function ask(path, body) {
  const options = body === undefined ? {} : {
    method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body),
  };
  const answer = await fetch(path, { cache: "no-store", ...options });
  const content = answer.status === 204 ? {} : await answer.json();
  if (!answer.ok) throw new Error(content.error?.message ?? `${answer.status}`);
  return content;
}

// Every action says what went wrong and lets the person try again.
function acting(element, event, action) {
  element.addEventListener(event, async (given) => {
    given.preventDefault();
    at("error").textContent = "";
    element.inert = true;
    try {
      await action();
    } catch (error) {
      at("error").textContent = error instanceof TypeError ? words.failed : error.message;
    } finally {
      element.inert = false;
    }
  });
}

function enter() {
  sessionStorage.removeItem("asking");
  // The page also stands in for others that want to know who one is: those are loaded anew.
  if (location.pathname === "/sign-in") location.replace("/");
  else location.reload();
}

async function goOn(answer) {
  if (answer.needs === "name") return show("by-name");
  history.replaceState(null, "", location.pathname + location.search); // the link is used up
  if (answer.user) return enter();
  sessionStorage.setItem("asking", JSON.stringify(answer));
  return wait(answer);
}

async function wait({ asking, code }) {
  at("code").textContent = code;
  show("waiting", words.waiting);
  for (;;) {
    await new Promise((done) => setTimeout(done, ASK_EVERY_MS));
    let answer;
    try {
      answer = await ask("/sign-in", { asking });
    } catch (error) {
      if (error instanceof TypeError) continue; // the network is away for a moment
      sessionStorage.removeItem("asking");
      show("by-key");
      at("error").textContent = error.message;
      return;
    }
    if (answer.user) return enter();
  }
}

async function showUsage(user) {
  const { days } = await ask(`/usage?days=1&user=${encodeURIComponent(user)}`);
  const took = days[0] ?? {};
  const count = (name) => (took[name] ?? 0).toLocaleString(language);
  const said = {
    requests: count("requests"), input: count("prompt_tokens"), cached: count("cached_tokens"),
    output: count("completion_tokens"), seconds: (took.machine_seconds ?? 0).toFixed(1),
  };
  at("usage").textContent = words.usage.replace(/\{(\w+)\}/g, (_, name) => said[name]);
}

function showAccount(account) {
  showUsage(account.user).catch((error) => { at("usage").textContent = error.message; });
  show("account", account.has_key ? `${words.hello} ${account.user}` : words.noKeys);
  at("to-chat").hidden = !account.may_infer;
  at("to-admin").hidden = !account.admin;
  // Without keys there is nothing to sign out of, and no key to be made.
  at("keyed").hidden = !account.has_key;
}

// Signed in, and yet not let through: the page says why, and what can be done.
function showRefused(account) {
  show("refused");
  at("title").textContent = words.refused;
  const isAdminsPage = location.pathname.startsWith("/admin") && !account.admin;
  at("refused-hint").textContent = words[isAdminsPage ? "forAdmins" : "forModel"].replace("{user}", account.user);
  at("refused-chat").hidden = !account.may_infer;
}

acting(at("by-key"), "submit", async () => goOn(await ask("/sign-in", { key: at("key").value.trim() })));
acting(at("by-name"), "submit", async () =>
  goOn(await ask("/sign-in", { link: secret, name: at("name").value.trim() })));
at("other-key").addEventListener("click", () => show("by-key"));
acting(at("sign-out"), "click", async () => {
  await ask("/sign-out", {});
  show("by-key");
});
acting(at("sign-out-all"), "click", async () => {
  await ask("/sign-out", { everywhere: true });
  show("by-key");
});
acting(at("new-key"), "click", async () => {
  const { key } = await ask("/account/key", { ends_the_old_one: true });
  at("shown-key").hidden = false;
  at("shown-key").firstElementChild.textContent = key;
});

const secret = location.hash.slice(1);
addEventListener("hashchange", () => location.reload());

async function begin() {
  const asked = sessionStorage.getItem("asking");
  if (secret) {
    show("", words.opening);
    return goOn(await ask("/sign-in", { link: secret }));
  }
  if (asked) return wait(JSON.parse(asked));
  const answer = await fetch("/account", { cache: "no-store" });
  if (!answer.ok) return show("by-key");
  const account = await answer.json();
  return location.pathname === "/sign-in" ? showAccount(account) : showRefused(account);
}

begin().catch((error) => {
  show("by-key");
  at("error").textContent = error instanceof TypeError ? words.failed : error.message;
});
