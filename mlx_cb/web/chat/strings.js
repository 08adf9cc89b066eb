// All words of the chat page, in English and Japanese.

const EN = {
  newChat: "New conversation", search: "Search conversations", conversations: "Conversations",
  noneYet: "Your conversations will be listed here.", noneFound: "Nothing found.",
  today: "Today", yesterday: "Yesterday", week: "Last seven days", older: "Older",
  openList: "Show the list of conversations", closeList: "Hide the list of conversations",
  skip: "Skip to the message field", thread: "Conversation", untitled: "New conversation",
  hello: "What can I do for you?",
  ideas: "Ways to begin",
  ideaSummary: "Summarise a text", ideaSummaryText: "Summarise this text in five points:\n\n",
  ideaMail: "Write an e-mail", ideaMailText: "Write a short, friendly e-mail that says ",
  ideaCode: "Explain code", ideaCodeText: "Explain step by step what this code does:\n\n",
  ideaIdeas: "Find ideas", ideaIdeasText: "Give me ten ideas for ",
  helloAccount: "This conversation will be kept in your account on the server, for you alone.",
  helloBrowser: "This conversation will stay in this browser. Nothing of it is kept on the server.",
  message: "Message", placeholder: "Write a message", send: "Send", stop: "Stop the answer",
  model: "Model", where: "Keep it", inAccount: "In my account", inBrowser: "Only in this browser",
  you: "You", copy: "Copy", copied: "Copied", edit: "Edit and ask anew", regenerate: "Answer anew",
  saveEdit: "Ask", cancel: "Cancel", editLabel: "Your message", previous: "Previous version",
  next: "Next version", version: (at, of) => `${at} of ${of}`, reasoning: "Reasoning",
  thinking: "Thinking …", writing: "The answer is being written.", finished: "The answer is complete.",
  perSecond: (rate) => `${rate} tokens/s`, first: (seconds) => `first token after ${seconds} s`,
  tokens: (count) => `${count} ${count === 1 ? "token" : "tokens"}`,
  stopped: "Stopped.", interrupted: "Interrupted: the server or this page was closed.",
  failed: "This answer failed:", cut: "Ended at the limit of tokens.",
  waitPreparing: "Reading your message …", waitOwn: "Waiting for another answer of yours to end …",
  waitEngine: "The model is being loaded …", waitTurn: "Waiting for its turn …",
  waitMemory: "Waiting for memory …", waitReading: "Reading your message …",
  ahead: (people) => (people === 1 ? "1 person ahead" : `${people} people ahead`),
  about: (seconds) => `about ${seconds} s`, sent: "Sent …",
  settings: "Settings of this conversation", system: "System prompt",
  systemHint: "What the model should know or keep to in this conversation.",
  temperature: "Temperature",
  samplingHint: "Temperature 0 gives the most probable answer, a higher one is freer. An empty field leaves it to the model.",
  topP: "Top p", topK: "Top k", minP: "Min p", repetition: "Repetition penalty",
  maxTokens: "Maximum tokens", seed: "Seed", modelDefault: "model's own",
  thinkingChoice: "Reasoning", auto: "Automatic", on: "On", off: "Off",
  save: "Save", saved: "Saved", close: "Close", rename: "Title",
  export: "Export", exportMd: "As Markdown", exportJson: "As JSON", remove: "Delete",
  removeTitle: "Delete this conversation?", removeText: "It will be deleted for good.",
  account: "Account and display", signedIn: (name) => `You are ${name}.`,
  localUser: "This server has no keys: everyone on this machine is one user.",
  theme: "Colours", themeAuto: "Like the system", light: "Light", dark: "Dark", language: "Language",
  data: "Your conversations", importFile: "Import", exportAll: "Export all", removeAll: "Delete all",
  removeAllTitle: "Delete all conversations?",
  removeAllText: "All conversations of your account and of this browser will be deleted for good.",
  imported: (count) => `${count} imported`, toAccount: "Keys and browsers", toAdmin: "Operator's page",
  keys: "Keyboard", keySend: "send", keyLine: "new line", keyNew: "new conversation",
  keySearch: "search", keyStop: "stop the answer", keyEdit: "edit the last question (field empty)",
  offline: "The connection to the server is lost; trying again …", unreachable: "The server cannot be reached.",
  loading: "Loading …", notHere: "This conversation is not here (any more).", toEnd: "To the newest message",
  local: "Only in this browser", notAllowed: "Your key does not carry the right to use the model.",
  storageFailed: "This browser does not let the page keep anything.", answering: "answer is being written",
};

const JA = {
  newChat: "新しい会話", search: "会話を検索", conversations: "会話",
  noneYet: "会話はここに一覧表示されます。", noneFound: "見つかりませんでした。",
  today: "今日", yesterday: "昨日", week: "過去 7 日間", older: "それ以前",
  openList: "会話の一覧を表示", closeList: "会話の一覧を隠す",
  skip: "入力欄へ移動", thread: "会話", untitled: "新しい会話",
  hello: "何をお手伝いしましょうか。",
  ideas: "はじめ方の例",
  ideaSummary: "文章を要約する", ideaSummaryText: "次の文章を 5 点に要約してください。\n\n",
  ideaMail: "メールを書く", ideaMailText: "次の内容を伝える、短く丁寧なメールを書いてください。\n\n",
  ideaCode: "コードを説明する", ideaCodeText: "次のコードの動作を順を追って説明してください。\n\n",
  ideaIdeas: "アイデアを出す", ideaIdeasText: "次のテーマについてアイデアを 10 個出してください:",
  helloAccount: "この会話はサーバー上のあなたのアカウントに保存され、あなただけが見られます。",
  helloBrowser: "この会話はこのブラウザにだけ残り、サーバーには保存されません。",
  message: "メッセージ", placeholder: "メッセージを入力", send: "送信", stop: "回答を止める",
  model: "モデル", where: "保存先", inAccount: "アカウント", inBrowser: "このブラウザのみ",
  you: "あなた", copy: "コピー", copied: "コピーしました", edit: "編集して聞き直す", regenerate: "もう一度回答",
  saveEdit: "送信", cancel: "キャンセル", editLabel: "あなたのメッセージ", previous: "前の版",
  next: "次の版", version: (at, of) => `${at} / ${of}`, reasoning: "思考の過程",
  thinking: "考えています…", writing: "回答を書いています。", finished: "回答が完了しました。",
  perSecond: (rate) => `${rate} トークン/秒`, first: (seconds) => `最初のトークンまで ${seconds} 秒`,
  tokens: (count) => `${count} トークン`,
  stopped: "停止しました。", interrupted: "サーバーまたはページが閉じられたため中断しました。",
  failed: "回答できませんでした:", cut: "トークン数の上限で終わりました。",
  waitPreparing: "メッセージを読んでいます…", waitOwn: "あなたの別の回答が終わるのを待っています…",
  waitEngine: "モデルを読み込んでいます…", waitTurn: "順番を待っています…",
  waitMemory: "メモリの空きを待っています…", waitReading: "メッセージを読んでいます…",
  ahead: (people) => `前に ${people} 人`, about: (seconds) => `約 ${seconds} 秒`, sent: "送信しました…",
  settings: "この会話の設定", system: "システムプロンプト",
  systemHint: "この会話でモデルに知っておいてほしいこと、守ってほしいこと。",
  temperature: "温度",
  samplingHint: "温度 0 は最も確からしい回答、大きいほど自由になります。空欄はモデルの既定値です。",
  topP: "Top p", topK: "Top k", minP: "Min p", repetition: "繰り返しペナルティ",
  maxTokens: "最大トークン数", seed: "シード", modelDefault: "モデルの既定値",
  thinkingChoice: "思考", auto: "自動", on: "する", off: "しない",
  save: "保存", saved: "保存しました", close: "閉じる", rename: "題名",
  export: "書き出し", exportMd: "Markdown", exportJson: "JSON", remove: "削除",
  removeTitle: "この会話を削除しますか。", removeText: "完全に削除され、元に戻せません。",
  account: "アカウントと表示", signedIn: (name) => `${name} としてサインイン中です。`,
  localUser: "このサーバーにはキーがなく、このマシンの全員が同じユーザーです。",
  theme: "配色", themeAuto: "システムに合わせる", light: "ライト", dark: "ダーク", language: "言語",
  data: "あなたの会話", importFile: "読み込み", exportAll: "すべて書き出し", removeAll: "すべて削除",
  removeAllTitle: "すべての会話を削除しますか。",
  removeAllText: "アカウントとこのブラウザのすべての会話が完全に削除されます。",
  imported: (count) => `${count} 件を読み込みました`, toAccount: "キーとブラウザ", toAdmin: "管理ページ",
  keys: "キーボード", keySend: "送信", keyLine: "改行", keyNew: "新しい会話",
  keySearch: "検索", keyStop: "回答を止める", keyEdit: "最後の質問を編集(入力欄が空のとき)",
  offline: "サーバーとの接続が切れました。再接続しています…", unreachable: "サーバーに接続できません。",
  loading: "読み込んでいます…", notHere: "この会話はありません。", toEnd: "最新のメッセージへ",
  local: "このブラウザのみ", notAllowed: "あなたのキーではモデルを使えません。",
  storageFailed: "このブラウザではページがデータを保存できません。", answering: "回答を書いています",
};

const TABLES = { en: EN, ja: JA };

function chosen() {
  const saved = recall("language");
  return saved in TABLES ? saved : navigator.language.startsWith("ja") ? "ja" : "en";
}

/** What the person chose on this browser, null when nothing (or nothing may be kept). */
export function recall(name) {
  try {
    return localStorage.getItem(`mlx-cb.${name}`);
  } catch {
    return null;
  }
}

export function remember(name, value) {
  try {
    if (value === null) localStorage.removeItem(`mlx-cb.${name}`);
    else localStorage.setItem(`mlx-cb.${name}`, value);
  } catch {
    // kept for this visit only
  }
}

export let language = chosen();
document.documentElement.lang = language;

export function setLanguage(name) {
  language = name;
  document.documentElement.lang = name;
  remember("language", name);
}

/** The word for a name, in the language chosen. */
export function t(name, ...values) {
  const word = TABLES[language][name];
  return typeof word === "function" ? word(...values) : word;
}

export const WORDS_OF = TABLES;
