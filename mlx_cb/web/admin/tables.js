// Users, requests, people, the control's record and the log: everything that is a list.
import { known, look, order } from "./data.js";
import { Act, Bar, clock, html, percent, short, span } from "./ui.js";

const REASONS = {
  budget: "the step is full",
  slots: "all places are taken",
  "fair share": "has the places of a fair share",
  blocks: "waits for memory",
  "batch to end": "waits for the batch to end",
  "next step": "about to begin",
};
export const reason = (text) => REASONS[text] ?? text;

/** Do it, then look at once at what became of it. */
const doing = (path, body) => async () => {
  await order(path, body);
  await look(true);
};

const Table = ({ name, heads, rows, empty }) => rows.length
  ? html`<div class="scroll" tabindex="0" role="region" aria-label=${name}><table>
      <thead><tr>${heads.map((head) => html`<th scope="col">${head}</th>`)}</tr></thead>
      <tbody>${rows}</tbody></table></div>`
  : html`<p class="empty">${empty}</p>`;

const paused = (kind) => known.state.engine.control?.restraint?.[kind] ?? [];

export function Users() {
  const { state, shares } = known;
  const here = state.overview?.users ?? {};
  const held = state.held_by_own_limit;
  const stopped = paused("paused_users");
  const { token_gap: gaps, first_token: firsts } = state.latency;
  const names = new Set([...Object.keys(here), ...Object.keys(held), ...Object.keys(gaps), ...stopped]);
  names.delete("");
  const canOrder = Boolean(state.engine.control);
  const rows = [...names].sort().map((user) => {
    const own = here[user] ?? { running: 0, waiting: 0, reasons: {}, oldest_wait: 0 };
    const why = Object.entries(own.reasons).map(([what, n]) => `${n} × ${reason(what)}`);
    if (held[user]) why.push(`${held[user]} × own limit`);
    const is = stopped.includes(user);
    return html`<tr key=${user}>
      <th scope="row">${user}${is && html` <span class="tag warn">paused</span>`}</th>
      <td class="n">${own.running}</td><td class="n">${own.waiting + (held[user] ?? 0)}</td>
      <td class="why">${why.join(", ") || "–"}</td>
      <td class="n">${own.oldest_wait ? span(own.oldest_wait) : "–"}</td>
      <td class="n"><${Bar} label=${`${percent(shares[user] ?? 0)} of the machine in the last minute`}
        parts=${[{ share: shares[user] ?? 0, kind: "decode" }]} /> ${percent(shares[user] ?? 0)}</td>
      <td class="n">${span(firsts[user]?.p50)} / ${span(firsts[user]?.p99)}</td>
      <td class="n">${span(gaps[user]?.p50)} / ${span(gaps[user]?.p99)}</td>
      <td class="acts">${canOrder && html`
        <${Act} label=${is ? "Resume" : "Pause"} run=${doing(`/admin/users/${user}/${is ? "resume" : "pause"}`)} />
        <${Act} label="Cancel all" kind="bad" sure="Really end them?"
          run=${doing(`/admin/users/${user}/cancel`)} />`}</td>
    </tr>`;
  });
  return html`<${Table} name="Users at work" empty="Nobody is at work."
    heads=${["User", "Runs", "Waits", "For what", "Longest wait", "Of the machine", "First token p50 / p99", "Gap p50 / p99", ""]}
    rows=${rows} />`;
}

export function Requests() {
  const { state } = known;
  const stopped = paused("paused_requests");
  const canOrder = Boolean(state.engine.control);
  const rows = (state.overview?.requests ?? []).map((one) => {
    const id = one.id.replace(/-\d+$/, "");
    const is = stopped.includes(id);
    const done = one.computed < one.prompt ? `reads ${short(one.computed)} of ${short(one.prompt)}` : "writes";
    return html`<tr key=${one.id}>
      <th scope="row"><a href=${`/status/requests/${one.id}`} target="_blank" rel="noopener"><code>${one.id.slice(0, 8)}${one.id.slice(id.length)}</code></a></th>
      <td>${one.user}</td>
      <td class="why">${one.waiting_for ? reason(one.waiting_for) : done}${is && html` <span class="tag warn">paused</span>`}</td>
      <td class="n">${span(one.age)}</td>
      <td class="n">${short(one.prompt)}</td><td class="n">${short(one.cached)}</td><td class="n">${short(one.output)}</td>
      <td class="acts">${canOrder && html`
        <${Act} label=${is ? "Resume" : "Pause"} run=${doing(`/admin/requests/${id}/${is ? "resume" : "pause"}`)} />
        <${Act} label="Cancel" kind="bad" run=${doing(`/admin/requests/${id}/cancel`)} />`}</td>
    </tr>`;
  });
  const more = (state.overview?.num_requests ?? 0) - rows.length;
  return html`<${Table} name="Requests" empty="No request is being answered."
    heads=${["Request", "User", "State", "Age", "Prompt", "Cached", "Answer", ""]} rows=${rows} />
    ${more > 0 && html`<p class="hint">and ${more} more</p>`}`;
}

/** What the control watches; a sign over its limit is an alarm. */
const Signs = ({ signs }) => signs.length > 0 && html`<ul class="signs">${signs.map(({ sign, unit, value, begins_at: limit }) => {
  const isAlarm = value !== null && value >= limit;
  return html`<li key=${sign} class=${isAlarm ? "alarm" : ""}>${sign}
    <strong>${value === null ? "–" : `${Number(value.toPrecision(2))} ${unit}`}</strong>
    <small>alarm from ${limit} ${unit}</small></li>`;
})}</ul>`;

export function Control() {
  const { control } = known.state.engine;
  if (!control) return html`<p class="empty">This engine has no control loop.</p>`;
  const now = control.now ?? known.state.overview?.now ?? 0;
  const records = [...(control.in_force ?? []), ...(control.records ?? []).filter((one) => one.ended != null)]
    .sort((a, b) => b.began - a.began).slice(0, 30);
  const rows = records.map((one) => html`<tr key=${one.number}>
    <td class="n">${span(Math.max(0, now - one.began))} ago</td>
    <th scope="row">${one.action}${one.target && ` (${one.target})`}
      ${one.ended == null && html` <span class="tag warn">in force</span>`}</th>
    <td>${one.by}</td>
    <td class="why">${one.cause}${one.ended == null ? "" : `; ended: ${one.ended_because}`}
      ${Object.keys(one.alternatives ?? {}).length > 0 && html`<details><summary>not done instead</summary>
        <ul>${Object.entries(one.alternatives).map(([name, why]) => html`<li>${name}: ${why}</li>`)}</ul></details>`}</td>
  </tr>`);
  return html`<${Signs} signs=${control.signs ?? []} />
    ${control.frozen && html`<p><span class="tag warn">frozen</span> It watches, and does nothing by itself.</p>`}
    <${Table} name="Alarms and actions" empty="Nothing had to be done." heads=${["When", "What", "By", "Why"]} rows=${rows} />`;
}

let wrongName = "";

export function People({ link, onLink }) {
  const { people, state } = known;
  const invite = async (event) => {
    event.preventDefault();
    const field = event.target.elements.name;
    const name = field.value.trim();
    wrongName = "";
    try {
      const made = await order("/admin/links", { name: name || null });
      field.value = "";
      await look(true);
      onLink({ ...made, name });
    } catch (error) {
      wrongName = error.message;
      onLink(null);
    }
  };
  const rows = people.map((one) => {
    const took = one.today ?? {};
    const rights = one.has_account ? [one.may_infer && "model", one.admin && "admin"].filter(Boolean).join(" + ") : "–";
    const day = (took.prompt_tokens ?? 0) + (took.completion_tokens ?? 0);
    return html`<tr key=${one.name}>
      <th scope="row">${one.name}</th><td>${rights}${one.rank === 1 && " (batch)"}</td>
      <td class="n">${one.weight ?? "–"}</td><td class="n">${one.browsers}</td>
      <td class="n">${short(took.requests ?? 0)}</td>
      <td class="n">${short(took.prompt_tokens ?? 0)} <small>(${short(took.cached_tokens ?? 0)} cached)</small></td>
      <td class="n">${short(took.completion_tokens ?? 0)}</td>
      <td class="n">${span(took.machine_seconds ?? 0)}</td>
      <td class="n">${one.daily_tokens ? `${percent(day / one.daily_tokens)} of ${short(one.daily_tokens)}` : "–"}</td>
    </tr>`;
  });
  return html`
    ${state.server.has_keys && html`<form class="invite" onSubmit=${invite}>
      <label for="invite">Invite</label>
      <input id="invite" name="name" placeholder="name, or empty for anybody" maxlength="64" autocomplete="off"
        pattern="[A-Za-z0-9][A-Za-z0-9._@\\-]*" />
      <button type="submit" class="strong">Make a link</button>
      ${wrongName && html`<span class="bad" role="alert">${wrongName}</span>`}
    </form>`}
    ${link && html`<div class="link"><img src=${link.picture} alt="The link as a picture for a phone's camera" width="180" height="180" />
      <p>${link.name ? `Lets ${link.name} in, once.` : "Lets one person in, once you confirm."} It is not shown again.<br />
      <code>${link.url}</code></p><${Act} label="Done" run=${() => onLink(null)} /></div>`}
    <${Table} name="People and their usage today" empty="Nobody has a key; everyone on this machine is one user."
      heads=${["Person", "May use", "Weight", "Browsers", "Requests today", "Input", "Output", "Machine", "Of the day's tokens"]} rows=${rows} />
    <p class="hint"><a href="/usage?days=30&format=csv">Usage of the last 30 days as CSV</a></p>`;
}

export const Asking = () => known.state.asking.map((one) => html`
  <div class="asking" role="alert" key=${one.code}>
    <p><strong>${one.name}</strong> at ${one.address} asks to be let in and sees the number <code>${one.code}</code>.</p>
    <${Act} label="Let in" kind="strong" run=${doing(`/admin/asking/${one.code}/confirm`)} />
    <${Act} label="Refuse" kind="bad" run=${doing(`/admin/asking/${one.code}/refuse`)} />
  </div>`);

export const Log = () => html`
  <ol class="log" tabindex="0" aria-label="Newest log lines first">
    ${[...known.lines].reverse().map((one) => html`
      <li key=${one.number} class=${one.level.toLowerCase()}><time>${clock(one.time)}</time> ${one.level !== "INFO" && html`<b>${one.level} </b>`}${one.text}</li>`)}
  </ol>`;
