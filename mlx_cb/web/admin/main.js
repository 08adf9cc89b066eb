// The operator's page: draws what `data` knows, anew at every look.
import { known, look, order, watch } from "./data.js";
import { Asking, Control, Log, People, Requests, Users } from "./tables.js";
import { Timeline } from "./timeline.js";
import { Act, Bar, Figure, gigabytes, html, percent, render, short, span } from "./ui.js";

let link = null;

const doing = (path) => async () => {
  await order(path);
  await look(false);
};

const Section = ({ name, wide, children }) => html`
  <section class=${wide ? "wide" : ""} aria-label=${name}><h2>${name}</h2>${children}</section>`;

function State() {
  const { server, engine } = known.state;
  if (known.lost) return html`<span class="tag bad" role="status">${known.lost}</span>`;
  if (server.closing) return html`<span class="tag warn" role="status">closing</span>`;
  if (engine.control?.draining) return html`<span class="tag warn" role="status">draining: takes nothing new</span>`;
  if (engine.stuck) return html`<span class="tag bad" role="status">makes no progress</span>`;
  return server.ready
    ? html`<span class="tag good" role="status">ready</span>`
    : html`<span class="tag warn" role="status">loading or restarting</span>`;
}

function Head() {
  const { server, engine, time } = known.state;
  const { control } = engine;
  const drains = control?.draining;
  return html`<header>
    <div><h1>${server.model}</h1> <${State} />
      <p class="hint">up ${span(time - server.started)}${engine.restarts ? `, engine restarted ${engine.restarts} ×` : ""}</p></div>
    <nav>
      ${control && drains !== undefined && html`
        <${Act} label=${drains ? "Take requests again" : "Drain"} title="Finish what is here, take nothing new"
          sure=${drains ? "" : "Really take nothing new?"}
          run=${doing(`/admin/control/${drains ? "resume" : "drain"}`)} />
        <${Act} label=${control.frozen ? "Unfreeze control" : "Freeze control"} title="Whether the control loop may act by itself"
          run=${doing(`/admin/control/${control.frozen ? "unfreeze" : "freeze"}`)} />`}
      <a class="button" href="/">Chat</a> <a class="button" href="/sign-in">Account</a>
    </nav>
  </header>`;
}

function Figures() {
  const { engine, latency, server } = known.state;
  const requests = engine.requests ?? { waiting: 0, prefilling: 0, decoding: 0, preemptions: 0 };
  const gap = latency.token_gap[""];
  const first = latency.first_token[""];
  return html`<dl class="figures">
    <${Figure} name="Answers open" value=${server.open_answers} />
    <${Figure} name="Running" value=${requests.decoding + requests.prefilling} note=${`${requests.prefilling} reading`} />
    <${Figure} name="Waiting" value=${requests.waiting} note=${engine.predicted_wait_s ? `about ${span(engine.predicted_wait_s)}` : ""} />
    <${Figure} name="Tokens per second" value=${short(known.tokensPerSecond)} />
    <${Figure} name="First token p50" value=${span(first?.p50)} note=${`p95 ${span(first?.p95)}, p99 ${span(first?.p99)}`} />
    <${Figure} name="Gap p50" value=${span(gap?.p50)} note=${`p95 ${span(gap?.p95)}, p99 ${span(gap?.p99)}`} />
    <${Figure} name="Machine busy" value=${percent(known.busy)} note="last minute" />
    <${Figure} name="Fairness" value=${fairness()} note="Jain, last minute" />
  </dl>`;
}

/** Jain's index over what those at work had of the machine, by weight; 1 is even. */
function fairness() {
  const weights = Object.fromEntries(known.people.map((one) => [one.name, one.weight ?? 1]));
  const parts = Object.keys(known.state.overview?.users ?? {}).map((user) => (known.shares[user] ?? 0) / (weights[user] ?? 1));
  const sum = parts.reduce((all, part) => all + part, 0);
  if (parts.length < 2 || sum === 0) return "–";
  return (sum ** 2 / (parts.length * parts.reduce((all, part) => all + part ** 2, 0))).toFixed(2);
}

function Memory() {
  const { engine, server } = known.state;
  const { blocks, memory, prefix_cache: cache } = engine;
  if (!blocks) return html`<p class="empty">This engine has no blocks.</p>`;
  const { ssd, ladder } = engine;
  const isOnDisk = ssd?.state === "on";
  const parts = [
    { share: blocks.used / blocks.capacity, kind: "decode" },
    { share: blocks.cached / blocks.capacity, kind: "cached" },
  ];
  return html`
    <${Bar} label=${`${blocks.used} of ${blocks.capacity} blocks used, ${blocks.cached} cached`} parts=${parts} />
    <ul class="legend"><li class="decode">${short(blocks.used)} used</li><li class="cached">${short(blocks.cached)} cached</li>
      <li>${short(blocks.capacity)} in all</li>${isOnDisk && html`<li>${short(ssd.blocks)} spilled to disk</li>`}</ul>
    <dl class="facts">
      <dt>Weights</dt><dd>${gigabytes(memory.weights)}</dd>
      <dt>Keys and values</dt><dd>${gigabytes(memory.kv_used)} used, ${gigabytes(memory.kv)} allocated</dd>
      <dt>Prefix hits</dt><dd>${cache.queried_tokens ? percent(cache.hit_tokens / cache.queried_tokens) : "–"} of ${short(cache.queried_tokens)} tokens</dd>
      <dt>Evictions</dt><dd>${short(blocks.evictions)}</dd>
      ${ssd && html`<dt>On disk</dt><dd>${isOnDisk
        ? `${gigabytes(ssd.bytes)} of ${gigabytes(ssd.capacity)}, ${short(ssd.restored_blocks)} blocks came back`
        : `off: ${ssd.reason}`}</dd>`}
      <dt>Preemptions</dt><dd>${short(engine.requests.preemptions)}${ladder ? `, ${short(ladder.recomputed_tokens)} tokens computed again` : ""}</dd>
      <dt>Server process</dt><dd>${gigabytes(server.memory)}</dd>
    </dl>`;
}

function Model() {
  const { engine, server } = known.state;
  const info = engine.model_info;
  if (!info) return html`<p class="empty">${server.model}: nothing more is known.</p>`;
  return html`<dl class="facts">
    <dt>Model</dt><dd>${info.name}</dd>
    <dt>Also called</dt><dd>${server.names.filter((name) => name !== info.name).join(", ") || "–"}</dd>
    <dt>Architecture</dt><dd>${info.architecture}, ${short(info.num_parameters)} parameters</dd>
    <dt>Numbers</dt><dd>${info.quantization ?? info.dtype}</dd>
    <dt>Context</dt><dd>${short(info.max_model_len)} tokens</dd>
    <dt>Layout</dt><dd>${info.layout}, attention ${info.attention}</dd>
    <dt>Policy</dt><dd>${engine.policy}</dd>
    <dt>Steps</dt><dd>${short(engine.steps.count)}${engine.steps.failed ? `, ${engine.steps.failed} failed` : ""}</dd>
  </dl>`;
}

function Page() {
  if (!known.state) return html`<p class="empty" role="status">${known.lost || "One moment …"}</p>`;
  return html`<${Head} /><main>
    <${Asking} />
    <${Figures} />
    <${Section} name="Steps" wide=${true}><${Timeline} steps=${known.steps} again=${show} /><//>
    <${Section} name="Users at work" wide=${true}><${Users} /><//>
    <${Section} name="Requests" wide=${true}><${Requests} /><//>
    <${Section} name="Memory"><${Memory} /><//>
    <${Section} name="Model"><${Model} /><//>
    <${Section} name="Alarms and actions" wide=${true}><${Control} /><//>
    <${Section} name="People" wide=${true}><${People} link=${link} onLink=${(made) => { link = made; show(); }} /><//>
    <${Section} name="Log" wide=${true}><${Log} /><//>
  </main>`;
}

function show() {
  render(html`<${Page} />`, document.getElementById("app"));
}

try {
  const theme = localStorage.getItem("mlx-cb.theme"); // as chosen in the chat
  if (theme === "light" || theme === "dark") document.documentElement.style.colorScheme = theme;
} catch {
  // storage is forbidden: the system's colours
}
show();
watch(show);
