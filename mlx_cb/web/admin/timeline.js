// The newest steps: how many rows each had, and how long it took beside what was predicted.
import { html, span } from "./ui.js";

const WIDTH = 240; // steps side by side
const HEIGHT = 100;
const nice = [1, 2, 5];

/** The smallest of 1, 2, 5, 10, 20, … that is not below `value`. */
export function ceiling(value) {
  let unit = 10 ** Math.floor(Math.log10(Math.max(value, 1e-9)));
  for (;;) {
    for (const factor of nice) if (factor * unit >= value * (1 - 1e-9)) return factor * unit;
    unit *= 10;
  }
}

const at = (k, number) => WIDTH - number + k;

/** One path of bars from `low(step)` to `high(step)`, in the scale of `most`. */
function bars(steps, low, high, most) {
  let path = "";
  steps.forEach((step, k) => {
    const from = HEIGHT * (1 - low(step) / most);
    const to = HEIGHT * (1 - high(step) / most);
    if (to < from) path += `M${at(k, steps.length)} ${from.toFixed(1)}V${to.toFixed(1)}h.85V${from.toFixed(1)}z`;
  });
  return path;
}

function line(steps, value, most) {
  return steps
    .map((step, k) => `${k ? "L" : "M"}${at(k, steps.length) + 0.42} ${(HEIGHT * (1 - Math.min(1, value(step) / most))).toFixed(1)}`)
    .join("");
}

const Chart = ({ name, top, label, children, onPoint }) => html`
  <figure class="chart">
    <figcaption>${name}</figcaption>
    <div class="plot">
      <span class="top">${top}</span><span class="zero">0</span>
      <svg viewBox="0 0 ${WIDTH} ${HEIGHT}" preserveAspectRatio="none" role="img" aria-label=${label}
           onPointerMove=${onPoint} onPointerLeave=${() => onPoint(null)}>
        <path class="grid" d="M0 ${HEIGHT / 2}H${WIDTH}M0 0.5H${WIDTH}" />
        ${children}
      </svg>
    </div>
  </figure>`;

/** Nearly the largest: a few large steps must not flatten all others, and are cut off. */
const most = (values) => [...values].sort((a, b) => a - b)[Math.floor(values.length * 0.98)];

let pointed = null; // the number of the step that is pointed at

/** Both charts; `again` draws the page anew. */
export function Timeline({ steps, again }) {
  if (!steps.length) return html`<p class="empty">No step has run yet.</p>`;
  const rowsOf = (s) => s.rows_decode + s.rows_prefill;
  const rows = ceiling(Math.max(8, most(steps.map(rowsOf))));
  const longest = ceiling(Math.max(0.001, most(steps.flatMap((s) => [s.predicted, s.measured ?? 0])) * 1.1));
  const last = steps[steps.length - 1];
  const shown = steps.find((s) => s.step === pointed) ?? last;
  const onPoint = (event) => {
    if (event === null) pointed = null;
    else {
      const box = event.currentTarget.getBoundingClientRect();
      const k = Math.floor(((event.clientX - box.left) / box.width) * WIDTH) - (WIDTH - steps.length);
      pointed = steps[k]?.step ?? null;
    }
    again();
  };
  const marker = pointed === null || shown === last ? "" : `M${at(steps.indexOf(shown), steps.length) + 0.42} 0V${HEIGHT}`;
  const measured = shown.measured === null ? "–" : span(shown.measured);
  const preempted = shown.preempted ? `, ${shown.preempted} preempted` : "";
  return html`
    <${Chart} name="Rows" top=${rows} onPoint=${onPoint}
        label=${`Rows of the last ${steps.length} steps; the newest has ${last.rows_decode} decode and ${last.rows_prefill} prefill rows`}>
      <path class="decode" d=${bars(steps, () => 0, (s) => Math.min(s.rows_decode, rows), rows)} />
      <path class="prefill" d=${bars(steps, (s) => s.rows_decode, (s) => Math.min(rowsOf(s), rows), rows)} />
      <path class="marker" d=${marker} />
    <//>
    <${Chart} name="Time" top=${span(longest)} onPoint=${onPoint}
        label=${`Time of the last ${steps.length} steps; the newest was predicted to take ${span(last.predicted)}`}>
      <path class="measured" d=${bars(steps, () => 0, (s) => Math.min(s.measured ?? 0, longest), longest)} />
      <path class="predicted" d=${line(steps, (s) => s.predicted, longest)} />
      <path class="marker" d=${marker} />
    <//>
    <ul class="legend">
      <li class="decode">decode rows</li><li class="prefill">prefill rows</li>
      <li class="measured">measured</li><li class="predicted">predicted</li>
    </ul>
    <p class="told">${`Step ${shown.step}: ${shown.rows_decode} decode + ${shown.rows_prefill} prefill rows, ` +
      `predicted ${span(shown.predicted)}, measured ${measured}, ${shown.waiting} waiting, ` +
      `${shown.blocks_used} blocks used${preempted}`}</p>`;
}
